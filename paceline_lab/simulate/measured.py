"""A setting from the records of a run: what steps took by their rows, and the time between services."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, median
from typing import Any

from paceline.costs.cost_line import CostLine
from paceline.protocol.errors import InvalidInput
from paceline.protocol.records import GenerationStats, RoundRecord
from paceline_lab.simulate.trace import TracedSetting

PROPOSAL_MS = 0.06
"""Of a core, for a proposal that a draft service prepares, on either side. A simulated run of `auto`, whose code is
the services' own, takes .13 ms of CPU for each, and replays are nearest with .06 (docs/capacity.md)."""
FEWEST_STEPS = 3
"""Steps of a size whose median is taken for a point of a line, where there are enough of any."""


def measured_setting(
    runs: Sequence[GenerationStats], stated: Mapping[str, Any], *, concurrency: int
) -> TracedSetting:
    """What a run's rounds say, behind the first of each request, which waits for the prompt.

    Args:
        runs: of all requests, `concurrency` of them at once.
        stated: lines that the services stated, by name; where they are silent, what is measured here counts.

    Raises:
        InvalidInput: no round that could be measured.
    """
    records = [record for stats in runs for record in stats.records[1:]]
    if not records:
        raise InvalidInput.of("rounds", 0, "two or more in a request, to measure what a step takes")
    lines = {name: CostLine(tuple((rows, ms) for rows, ms in points)) for name, points in stated.items()}
    sent_rounds = [record for record in records if not record.self_started]
    own_rounds = [record for record in records if record.self_started]
    drafted = [record for record in records if record.draft_wait_ms > 0 and record.draft.forward_ms > 0]
    drafted = [record for record in drafted if not record.cache_hit and record.proposed]
    draft = lines.get("draft") or line_of((max(1, each.draft.rows), _level_ms(each)) for each in drafted)
    alone = lines.get("alone") or line_of((record.target.rows, _step_ms(record)) for record in records)
    return TracedSetting(
        alone=alone,
        beside=lines.get("beside", CostLine()),
        draft=draft,
        draft_beside=lines.get("draft_beside", CostLine()),
        draft_gap_ms=_average(_beyond_ms(each, draft) for each in drafted if draft.is_known),
        target_one_way_ms=one_way_ms((record.wire_ms for record in sent_rounds), concurrency),
        draft_one_way_ms=one_way_ms(
            (max(0.0, each.draft_wait_ms - each.draft.service_ms) for each in drafted), concurrency
        ),
        coordinator_ms=_between_ms(runs),
        proposal_ms=PROPOSAL_MS,
        gap_ms=_middle(
            max(0.0, each.round_ms - alone.ms(each.target.rows)) for each in own_rounds if not each.proposed
        ),
    )


def line_of(steps: Iterable[tuple[int, float]]) -> CostLine:
    """Medians by rows, made to rise; of sizes that were seen often, where there are any."""
    by_rows: defaultdict[int, list[float]] = defaultdict(list)
    for rows, ms in steps:
        by_rows[rows].append(ms)
    often = {rows: times for rows, times in by_rows.items() if len(times) >= FEWEST_STEPS} or by_rows
    points, floor = [], 0.0
    for rows in sorted(often)[:64]:
        floor = max(floor, median(often[rows]))
        points.append((float(rows), floor))
    return CostLine(tuple(points))


def _step_ms(record: RoundRecord) -> float:
    """What a round takes at the target beyond its wait for the step."""
    return max(0.0, record.target.service_ms - record.target.queue_ms)


def _level_ms(record: RoundRecord) -> float:
    return record.draft.forward_ms / max(1, record.proposed)


def _beyond_ms(record: RoundRecord, line: CostLine) -> float:
    """What a step of the draft took beyond its line, where a round waited for it."""
    steps = max(1, record.proposed)
    return max(0.0, (record.draft.service_ms - record.draft.queue_ms) / steps - line.ms(max(1, record.draft.rows)))


def _between_ms(runs: Sequence[GenerationStats]) -> float:
    """The coordinator's time for a verdict, of which replays charge each: the rule, the plan, what no record has."""
    total, verdicts = 0.0, 0
    for stats in runs:
        rounds = stats.records[1:]
        verdicts += len(rounds)
        total += sum(record.accept_ms for record in rounds if not record.self_started)
        if rounds and stats.tokens_per_second:
            tokens = stats.committed - stats.records[0].accepted - 1
            total += max(0.0, 1e3 * tokens / stats.tokens_per_second - sum(record.round_ms for record in rounds))
    return total / verdicts if verdicts else 0.0


def _middle(values: Iterable[float]) -> float:
    numbers = [*values]
    return median(numbers) if numbers else 0.0


def _average(values: Iterable[float]) -> float:
    """Of what adds up, and differs from step to step."""
    numbers = [*values]
    return mean(numbers) if numbers else 0.0


def one_way_ms(trips: Iterable[float], concurrency: int) -> float:
    """Half of what a trip takes where nobody else's messages are dealt with first.

    Of so many requests at once, one finds nobody before it: theirs are the shortest trips, whose median this is.
    """
    numbers = sorted(trips)
    return numbers[len(numbers) // (2 * concurrency)] / 2 if numbers else 0.0
