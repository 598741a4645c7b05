"""What a simulated cluster comes to: speeds, latencies, shares of time, cost, and what bounds it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline_lab.reporting.figures import percentile
from paceline_lab.simulate.cluster import CellRecord
from paceline_lab.simulate.requests import RequestTotals
from paceline_lab.simulate.scenario import Scenario

FULL = 0.9
"""Share of its time or rows from which a service is what bounds the cluster."""
LONG_STEPS = 1.5
"""Times a single row's step from which steps are bound by their rows."""
MUCH_WAITING = 0.2
"""Share of a request's time behind its first round from which waiting for drafts bounds it."""


@dataclass(frozen=True)
class GroupOutcome:
    """One kind of traffic's requests that arrived within the counted time. Milliseconds.

    Attributes:
        refused, limited: by services without room, and by the tenant's own limits.
        unfinished: of `requests`, that had not ended when the run did.
        ttft: time to the first tokens; `tpot`: time per token behind them, of each request.
    """

    name: str
    requests: int
    refused: int
    limited: int
    unfinished: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float


@dataclass(frozen=True)
class ClusterOutcome:
    """A whole cluster, scaled up from the cells that were simulated.

    Attributes:
        rows_per_step, long_steps: of targets; the latter is a step of so many rows over one of a single row.
        waiting_for_drafts, queueing, stepping: shares of requests' time behind their first round.
        cost_per_million: of tokens; 0: no prices are stated.
        lost_sessions: of services that failed, in the simulated cells: they went on elsewhere.
        bottleneck: in words.
    """

    gpus: int
    cells: int
    simulated_cells: int
    tokens_per_second: float
    tokens_per_second_per_gpu: float
    rounds: int
    tokens_per_round: float
    proposed_per_drafted_round: float
    accepted_per_drafted_round: float
    acceptance: float
    hits: float
    self_started: float
    target_busy: float
    draft_busy: float
    coordinator_busy: float
    kv_share: float
    rows_per_step: float
    long_steps: float
    waiting_for_drafts: float
    queueing: float
    stepping: float
    cost_per_million: float
    lost_sessions: int
    bottleneck: str
    groups: tuple[GroupOutcome, ...]

    @property
    def requests(self) -> int:
        """Counted."""
        return sum(each.requests for each in self.groups)

    @property
    def refused(self) -> int:
        """By services without room."""
        return sum(each.refused for each in self.groups)

    @property
    def unfinished(self) -> int:
        """When the run ended."""
        return sum(each.unfinished for each in self.groups)


def outcome(scenario: Scenario, cells: Sequence[CellRecord]) -> ClusterOutcome:
    """Fold the simulated cells of a scenario, and scale."""
    counted = [each for cell in cells for each in cell.totals if _is_counted(scenario, each)]
    served = [each for each in counted if each.rounds]
    seconds = scenario.seconds - scenario.warmup_seconds
    speed = scenario.cells * sum(cell.tokens for cell in cells) / (seconds * len(cells))
    drafted = sum(each.drafted_rounds for each in served)
    rounds = sum(each.rounds for each in served)
    proposed, accepted = sum(each.proposed for each in served), sum(each.accepted for each in served)
    behind_ms = sum(each.end_ms - each.first_ms for each in served) or 1.0
    rows_per_step = sum(cell.rows for cell in cells) / max(1, sum(cell.steps for cell in cells))
    shares = _Shares(
        _mean(cell.target_busy for cell in cells),
        _mean(cell.draft_busy for cell in cells),
        _mean(cell.coordinator_busy for cell in cells),
        _mean(cell.kv_share for cell in cells),
        max(cell.most_waiting for cell in cells),
        _long_steps(scenario, rows_per_step),
        sum(each.waited_ms for each in served) / behind_ms,
        sum(each.refused and not each.limited for each in counted),
    )
    return ClusterOutcome(
        gpus=scenario.gpus,
        cells=scenario.cells,
        simulated_cells=len(cells),
        tokens_per_second=speed,
        tokens_per_second_per_gpu=speed / scenario.gpus,
        rounds=rounds,
        tokens_per_round=sum(each.tokens for each in served) / max(1, rounds),
        proposed_per_drafted_round=proposed / max(1, drafted),
        accepted_per_drafted_round=accepted / max(1, drafted),
        acceptance=accepted / max(1, proposed),
        hits=sum(each.hits for each in served) / max(1, rounds),
        self_started=sum(each.self_started for each in served) / max(1, rounds),
        target_busy=shares.target,
        draft_busy=shares.draft,
        coordinator_busy=shares.coordinator,
        kv_share=shares.kv,
        rows_per_step=rows_per_step,
        long_steps=shares.long_steps,
        waiting_for_drafts=shares.waiting,
        queueing=sum(each.queue_ms for each in served) / behind_ms,
        stepping=sum(each.step_ms for each in served) / behind_ms,
        cost_per_million=_cost(scenario, cells, speed),
        lost_sessions=sum(cell.lost_sessions for cell in cells),
        bottleneck=shares.bottleneck(),
        groups=tuple(_group(scenario, cells, number) for number in range(len(scenario.traffic))),
    )


@dataclass(frozen=True)
class _Shares:
    """What the bottleneck is told from."""

    target: float
    draft: float
    coordinator: float
    kv: float
    most_waiting: int
    long_steps: float
    waiting: float
    refused: int

    def bottleneck(self) -> str:
        """The first of these that holds."""
        if self.most_waiting and self.kv >= FULL / 2:
            return f"KV rows of the targets ({self.kv:.0%} reserved on average, sessions waited for them)"
        if self.coordinator >= FULL:
            return f"coordinators ({self.coordinator:.0%} of their time)"
        if self.waiting >= MUCH_WAITING and self.draft >= FULL:
            return f"drafts ({self.draft:.0%} busy; requests wait for them {self.waiting:.0%} of their time)"
        if self.long_steps >= LONG_STEPS and self.target >= FULL:
            return f"rows of target steps (a step takes {self.long_steps:.1f} times a single row's)"
        if self.refused:
            return "room for requests (some were refused)"
        if self.waiting >= MUCH_WAITING:
            return f"the way to drafts (requests wait for them {self.waiting:.0%} of their time)"
        return f"none: latency is a target's step (a step takes {self.long_steps:.1f} times a single row's)"


def _is_counted(scenario: Scenario, totals: RequestTotals) -> bool:
    return 1e3 * scenario.warmup_seconds <= totals.arrival_ms < 1e3 * scenario.seconds


def _long_steps(scenario: Scenario, rows: float) -> float:
    line = scenario.targets[0].line
    return line.ms(rows) / line.ms(1) if line.ms(1) else 1.0


def _cost(scenario: Scenario, cells: Sequence[CellRecord], speed: float) -> float:
    """Of a million tokens: what all services cost for as long as that takes."""
    seconds = scenario.seconds - scenario.warmup_seconds
    targets = sum(each.count for each in scenario.targets)
    target_hour = sum(each.count * each.price_per_hour for each in scenario.targets)
    paid = _mean(cell.target_ms for cell in cells) / (1e3 * seconds * targets)
    hour = target_hour * paid + sum(each.count * each.price_per_hour for each in scenario.drafts)
    hour += scenario.coordinators.count * scenario.coordinators.price_per_hour
    return 1e6 * scenario.cells * hour / (3600 * speed) if speed else 0.0


def _group(scenario: Scenario, cells: Sequence[CellRecord], number: int) -> GroupOutcome:
    totals_at_end = (each for cell in cells for each in cell.totals)
    running = (each for cell in cells for each in cell.running)
    mine, left = (
        [each for each in totals if each.group == number and _is_counted(scenario, each)]
        for totals in (totals_at_end, running)
    )
    served = [each for each in mine if each.rounds]
    first = [each.first_ms - each.arrival_ms for each in served]
    token = [each.ms_per_token for each in served if each.tokens > each.first_tokens]
    return GroupOutcome(
        name=scenario.traffic[number].name,
        requests=len(mine) + len(left),
        refused=sum(each.refused and not each.limited for each in mine),
        limited=sum(each.limited for each in mine),
        unfinished=len(left),
        ttft_p50_ms=percentile(first, 50),
        ttft_p99_ms=percentile(first, 99),
        tpot_p50_ms=percentile(token, 50),
        tpot_p99_ms=percentile(token, 99),
    )


def _mean(values: Iterable[float]) -> float:
    numbers = [*values]
    return sum(numbers) / len(numbers) if numbers else 0.0
