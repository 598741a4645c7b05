"""Statistics of one generation, folded from its round records."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict

from paceline.protocol.explanation import PlanExplanation
from paceline.protocol.proposal import PREDICTION
from paceline.protocol.records import MAX_RECORDS, GenerationStats, RoundRecord, RoundStats


class StatsBuilder:
    """Collects round records; `build` folds them once, at the end."""

    def __init__(self, arrived: float) -> None:
        self.arrived = arrived
        """When the request did (`time.perf_counter`)."""
        self._records: list[RoundRecord] = []
        self._commits: list[tuple[int, float]] = []

    def add(self, record: RoundRecord, committed: int, decided: float) -> None:
        """Count one round and the tokens that it committed at `decided` (`time.perf_counter`)."""
        self._records.append(record)
        self._commits.append((committed, decided))

    @property
    def tells_last(self) -> bool:
        """Whether the record that was added last is among those that a client is told."""
        return len(self._records) <= MAX_RECORDS

    def build(
        self,
        explanation: PlanExplanation | None = None,
        cached_prompt_tokens: int | None = None,
        feature_bytes: int = 0,
    ) -> GenerationStats:
        """The statistics so far, with why it was drafted for so if the request asked for it, and what was cached."""
        records = self._records
        first = self._commits[0][1] if self._commits else self.arrived
        spec = [record for record in records if record.proposed]
        predicted = [record for record in spec if record.drafter == PREDICTION]
        num_spec_tokens = max((record.proposed for record in spec), default=0)
        histogram = [0] * (num_spec_tokens + 1 if spec else 0)
        for record in spec:
            histogram[record.accepted] += 1
        reasons = any(record.reasoning for record in records)
        return GenerationStats(
            **asdict(self._together(range(len(records)))),
            cache_hits=sum(record.cache_hit for record in records),
            cache_misses=sum(record.cache_miss for record in records),
            time_to_first_token_ms=(first - self.arrived) * 1e3,
            verify_ms_p50=_median([record.wire_ms + record.target.service_ms for record in records]),
            draft_wait_ms_p50=_median([record.draft_wait_ms for record in records]),
            acceptance_histogram=tuple(histogram),
            num_spec_tokens=num_spec_tokens,
            records=tuple(records[:MAX_RECORDS]),
            explanation=explanation,
            prediction_accepted=sum(record.accepted for record in predicted),
            prediction_rejected=sum(record.proposed - record.accepted for record in predicted),
            cached_prompt_tokens=cached_prompt_tokens,
            feature_bytes=feature_bytes,
            reasoning=self._part(reasoning=True) if reasons else None,
            answer=self._part(reasoning=False) if reasons else None,
        )

    def _part(self, *, reasoning: bool) -> RoundStats:
        return self._together([i for i, record in enumerate(self._records) if record.reasoning == reasoning])

    def _together(self, rounds: Sequence[int]) -> RoundStats:
        """Of the rounds with these numbers; the first of all waited for the prompt, so no rate counts it."""
        spec = [record for i in rounds if (record := self._records[i]).proposed]
        timed = [i for i in rounds if i]
        return RoundStats(
            rounds=len(rounds),
            committed=sum(self._commits[i][0] for i in rounds),
            tokens_per_second=_rate(
                sum(self._commits[i][0] for i in timed),
                math.fsum(self._commits[i][1] - self._commits[i - 1][1] for i in timed),
            ),
            num_spec_steps=len(spec),
            num_draft_tokens=sum(record.proposed for record in spec),
            num_accepted_draft_tokens=sum(record.accepted for record in spec),
        )


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0
