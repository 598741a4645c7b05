"""Statistics of one generation, computed from its round records."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict

from paceline.protocol.explanation import PlanExplanation
from paceline.protocol.proposal import PREDICTION
from paceline.protocol.records import MAX_RECORDS, GenerationStats, RoundRecord, RoundStats


class StatsBuilder:
    """Collects round records; `build` sums them up once, at the end."""

    def __init__(self, arrived_at: float) -> None:
        self.arrived_at = arrived_at
        """When the request arrived (`clock.now`)."""
        self.records: list[RoundRecord] = []
        self._commits: list[tuple[int, float]] = []

    def add(self, record: RoundRecord, committed: int, decided_at: float) -> None:
        """Count one round and the tokens that it committed at `decided_at` (`clock.now`)."""
        self.records.append(record)
        self._commits.append((committed, decided_at))

    @property
    def reports_last(self) -> bool:
        """Whether the record that was added last is among those that a client gets."""
        return len(self.records) <= MAX_RECORDS

    def build(
        self,
        explanation: PlanExplanation | None = None,
        cached_prompt_tokens: int | None = None,
        feature_bytes: int = 0,
    ) -> GenerationStats:
        """The statistics so far.

        Args:
            explanation: of the drafting plan, if the request asked for it.
            cached_prompt_tokens: prompt tokens that the target had in its cache; None: not known.
            feature_bytes: bytes of features that the target sent.
        """
        records = self.records
        first = self._commits[0][1] if self._commits else self.arrived_at
        spec_rounds = [record for record in records if record.proposed]
        prediction_rounds = [record for record in spec_rounds if record.drafter == PREDICTION]
        num_spec_tokens = max((record.proposed for record in spec_rounds), default=0)
        histogram = [0] * (num_spec_tokens + 1 if spec_rounds else 0)
        for record in spec_rounds:
            histogram[record.accepted] += 1
        reasons = any(record.reasoning for record in records)
        return GenerationStats(
            **asdict(self._fold(range(len(records)))),
            cache_hits=sum(record.cache_hit for record in records),
            cache_misses=sum(record.cache_miss for record in records),
            time_to_first_token_ms=(first - self.arrived_at) * 1e3,
            verify_ms_p50=_median([record.wire_ms + record.target.service_ms for record in records]),
            draft_wait_ms_p50=_median([record.draft_wait_ms for record in records]),
            acceptance_histogram=tuple(histogram),
            num_spec_tokens=num_spec_tokens,
            records=tuple(records[:MAX_RECORDS]),
            explanation=explanation,
            prediction_accepted=sum(record.accepted for record in prediction_rounds),
            prediction_rejected=sum(record.proposed - record.accepted for record in prediction_rounds),
            cached_prompt_tokens=cached_prompt_tokens,
            feature_bytes=feature_bytes,
            reasoning=self._part(reasoning=True) if reasons else None,
            answer=self._part(reasoning=False) if reasons else None,
        )

    def _part(self, *, reasoning: bool) -> RoundStats:
        return self._fold([i for i, record in enumerate(self.records) if record.reasoning == reasoning])

    def _fold(self, rounds: Sequence[int]) -> RoundStats:
        """Sum up the rounds with these numbers. Round 0 waited for the prompt, so no rate counts it."""
        spec_rounds = [record for i in rounds if (record := self.records[i]).proposed]
        timed_rounds = [i for i in rounds if i]
        return RoundStats(
            rounds=len(rounds),
            committed=sum(self._commits[i][0] for i in rounds),
            tokens_per_second=_rate(
                sum(self._commits[i][0] for i in timed_rounds),
                math.fsum(self._commits[i][1] - self._commits[i - 1][1] for i in timed_rounds),
            ),
            num_spec_steps=len(spec_rounds),
            num_draft_tokens=sum(record.proposed for record in spec_rounds),
            num_accepted_draft_tokens=sum(record.accepted for record in spec_rounds),
        )


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0
