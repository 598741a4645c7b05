"""One cell of a scenario on the virtual clock: requests arrive, are limited, placed, served; targets come and go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.access.keys import KeyLimits
from paceline.access.limits import Meter
from paceline.protocol.errors import Overloaded
from paceline_lab.simulate.placed import RETRY_MS
from paceline_lab.simulate.rounds import RequestTotals
from paceline_lab.simulate.scenario import Autoscaling, Scenario, Traffic
from paceline_lab.simulate.services import SimulatedServices
from paceline_lab.simulate.session import SimulatedSession
from paceline_lab.simulate.target import SimulatedTarget
from paceline_lab.simulate.traffic import TrafficSource


@dataclass
class CellRecord:
    """What is kept of a cell's run.

    Attributes:
        totals: of all requests that have ended or were refused.
        tokens, rows, steps: within the counted time; rows and steps of targets.
        running: of requests that had not ended when the run did.
        target_busy, draft_busy, coordinator_busy: shares of the counted time, mean over those that ran.
        kv_share: of the targets' KV rows, reserved on average over the run.
        waited_for_rows: how often a session found none.
        target_ms: how long targets were paid for, all together, within the counted time.
        most_waiting: sessions at once that waited for room at one target.
    """

    totals: list[RequestTotals] = field(default_factory=list)
    tokens: int = 0
    rows: int = 0
    steps: int = 0
    running: list[RequestTotals] = field(default_factory=list)
    target_busy: float = 0.0
    draft_busy: float = 0.0
    coordinator_busy: float = 0.0
    kv_share: float = 0.0
    waited_for_rows: int = 0
    target_ms: float = 0.0
    most_waiting: int = 0


@dataclass(frozen=True)
class _Busy:
    """Milliseconds that services were at work up to a moment, and rows and steps of targets."""

    targets: float
    drafts: float
    coordinators: float
    rows: int
    steps: int


class CellRun:
    """Runs one cell."""

    def __init__(self, scenario: Scenario, cell: int) -> None:
        self._scenario = scenario
        self._seed = scenario.seed * 1_000_003 + cell
        self._begin, self._end = 1e3 * scenario.warmup_seconds, 1e3 * scenario.seconds
        self._world = SimulatedServices(scenario.layout(self._seed), (scenario.policy,), scenario.disturbance)
        self._world.on_ended, self._world.tally = self._ended, self._tally
        self._agenda = self._world.agenda
        self._sources = [
            TrafficSource(each, group, self._seed, scenario.seed) for group, each in enumerate(scenario.traffic)
        ]
        self._meters = [self._meter(each) for each in scenario.traffic]
        self._record = CellRecord()
        self._begun: list[RequestTotals] = []
        self._scaler: _Autoscaler | None = None

    def run(self) -> CellRecord:
        """Until all requests have ended, or the time for that has."""
        for group, source in enumerate(self._sources):
            self._next(group, source.arrivals_ms())
        begun: list[_Busy] = []
        self._agenda.at(self._begin, lambda _: begun.append(self._busy()))
        self._agenda.at(self._end, lambda _: begun.append(self._busy()))
        if self._scenario.autoscaling is not None:
            self._scaler = _Autoscaler(self._world, self._scenario.autoscaling, self._begin, self._end)
        self._agenda.run(self._end + 1e3 * self._scenario.drain_seconds)
        self._finish(*begun)
        return self._record

    def _next(self, group: int, arrivals: Iterator[float]) -> None:
        at = next(arrivals, None)
        if at is not None and at < self._end:
            self._agenda.at(at, self._arrive, (group, arrivals))

    def _arrive(self, arriving: tuple[int, Iterator[float] | None]) -> None:
        group, arrivals = arriving
        now, meter = self._agenda.now, self._meters[group]
        request = self._sources[group].request(now)
        home = self._world.another_home() or self._world.coordinators[0]
        session = SimulatedSession(len(self._begun) + 1, request, home, self._world)
        self._begun.append(session.totals)
        try:
            if meter is not None:
                meter.begin()
                meter.take_prompt(request.prompt_tokens)
        except Overloaded as error:
            session.totals.refused = True
            session.totals.limited = True
            self._record.totals.append(session.totals)
            self._follow(group, error.retry_after_ms or RETRY_MS)
        else:
            session.arrive(None)
        if arrivals is not None:
            self._next(group, arrivals)

    def _ended(self, totals: RequestTotals) -> None:
        self._record.totals.append(totals)
        meter = self._meters[totals.group]
        if meter is not None:
            meter.take_generated(totals.tokens)
            meter.end()
        self._follow(totals.group, RETRY_MS if totals.refused else 0.0)

    def _follow(self, group: int, pause_ms: float) -> None:
        """The next request of sessions comes; behind a refusal after a pause, as clients do."""
        at = self._agenda.now + pause_ms
        if self._scenario.traffic[group].sessions and at < self._end:
            self._agenda.at(at, self._arrive, (group, None))

    def _meter(self, traffic: Traffic) -> Meter | None:
        tokens, requests = traffic.tokens_per_minute or None, traffic.requests_per_minute or None
        if tokens is None and requests is None:
            return None
        limits = KeyLimits(requests_per_minute=requests, tokens_per_minute=tokens)
        return Meter(limits, lambda: self._agenda.now / 1e3)

    def _tally(self, now: float, tokens: int) -> None:
        if self._begin <= now < self._end:
            self._record.tokens += tokens

    def _busy(self) -> _Busy:
        world = self._world
        return _Busy(
            sum(each.busy_ms for each in world.targets),
            sum(each.busy_ms for each in world.drafts),
            sum(each.busy_ms for each in world.coordinators),
            sum(each.rows_computed for each in world.targets),
            sum(each.steps for each in world.targets),
        )

    def _finish(self, begun: _Busy, ended: _Busy) -> None:
        record, world, counted_ms = self._record, self._world, self._end - self._begin
        record.target_ms = self._scaler.paid_ms if self._scaler else counted_ms * len(world.targets)
        record.target_busy = (ended.targets - begun.targets) / max(1e-9, record.target_ms)
        record.draft_busy = (ended.drafts - begun.drafts) / (counted_ms * max(1, len(world.drafts)))
        record.coordinator_busy = (ended.coordinators - begun.coordinators) / (counted_ms * len(world.coordinators))
        record.rows, record.steps = ended.rows - begun.rows, ended.steps - begun.steps
        admissions = [target.admission for target in world.targets]
        record.kv_share = sum(each.mean_share(self._agenda.now) for each in admissions) / len(admissions)
        record.waited_for_rows = sum(each.waited_for_rows for each in admissions)
        record.most_waiting = max(each.most_waiting for each in admissions)
        record.running = [each for each in self._begun if not each.has_ended]


class _Autoscaler:
    """Starts and drains targets by their mean load."""

    def __init__(self, world: SimulatedServices, rule: Autoscaling, begin: float, end: float) -> None:
        self._world, self._rule, self._begin, self._end = world, rule, begin, end
        self._starting: set[int] = set()
        self.paid_ms = 0.0
        world.agenda.at(1e3 * rule.every_seconds, self._look)

    def _look(self, _: None) -> None:
        rule, targets, now = self._rule, self._world.targets, self._world.agenda.now
        every_ms = 1e3 * rule.every_seconds
        running = [each for each in targets if each.is_up and not each.drains]
        paid = sum(each.is_up for each in targets) + len(self._starting)
        self.paid_ms += paid * max(0.0, min(now, self._end) - max(now - every_ms, self._begin))
        load = sum(each.load for each in running) / max(1, len(running))
        if load > rule.up_above:
            self._start()
        elif load < rule.down_below and len(running) > rule.least:
            running[-1].drains = True
        for each in targets:
            if each.drains and not each.load:
                each.is_up = each.drains = False
        if now < self._end:
            self._world.agenda.at(now + every_ms, self._look)

    def _start(self) -> None:
        targets = self._world.targets
        off = [n for n, each in enumerate(targets) if not each.is_up and n not in self._starting]
        if off and not self._starting:
            self._starting.add(off[0])
            agenda = self._world.agenda
            agenda.at(agenda.now + 1e3 * self._rule.start_seconds, self._started, off[0])

    def _started(self, number: int) -> None:
        self._starting.discard(number)
        target: SimulatedTarget = self._world.targets[number]
        target.is_up = True


def run_cells(scenario: Scenario) -> list[CellRecord]:
    """Those that are simulated; cells share nothing, so each has a clock of its own."""
    return [CellRun(scenario, cell).run() for cell in range(scenario.simulated_cells)]
