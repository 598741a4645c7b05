"""Statistics of a request with rounds of stated acceptance and equal times."""

from __future__ import annotations

from paceline.protocol.records import GenerationStats, RoundRecord, StepTimings


def stats_of(*accepted: int, tokens_per_second: float = 100.0) -> GenerationStats:
    records = tuple(
        RoundRecord(
            base_length=1,
            accept_ms=0.0,
            cache_hit=False,
            proposed=2,
            accepted=each,
            target=StepTimings(rows=3, forward_ms=10.0, service_ms=10.0),
            draft=StepTimings(rows=1, forward_ms=4.0, service_ms=4.0),
            drafter="model",
            round_ms=16.0,
            wire_ms=1.0,
            draft_wait_ms=5.0,
        )
        for each in accepted
    )
    committed = sum(each + 1 for each in accepted)
    return GenerationStats(len(records), committed, tokens_per_second=tokens_per_second, records=records)
