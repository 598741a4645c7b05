"""A generation's rounds replayed at no cost of coordination, and pairs of generations with overlap and without.

A round costs T_verify, and one round trip of the delay on the way to the target unless the round was
self-started. One whose proposal was not in the speculation cache costs the time that the draft spent on its steps
for it too, and the round trip to the draft. Nothing else costs anything. With a perfect cache no round costs those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from paceline.client import Client, Generation
from paceline.protocol.generation import GenerateRequest
from paceline.protocol.records import GenerationStats, RoundRecord
from paceline_lab.bench.simulated.services import drafted, is_hit

K = 4
FAN_OUT = 4
SPECULATION = drafted(K)


@dataclass(frozen=True)
class RoundReplay:
    """Generations after their first rounds, and the same rounds at no cost of coordination. Seconds."""

    rounds: int
    hits: int
    self_started: int
    tokens: int
    seconds: float
    ideal_seconds: float
    perfect_seconds: float

    @property
    def hit_rate(self) -> float:
        """Return the share of rounds that were hits."""
        return self.hits / self.rounds

    @property
    def self_started_rate(self) -> float:
        """Return the share of rounds that the target started by itself, with a prefetched proposal."""
        return self.self_started / self.rounds

    @property
    def tokens_per_second(self) -> float:
        """Return the speed of the run."""
        return self.tokens / self.seconds

    @property
    def of_ideal(self) -> float:
        """Return the share of the ideal's speed."""
        return self.ideal_seconds / self.seconds

    @property
    def of_perfect(self) -> float:
        """Return the share of the perfect cache's speed."""
        return self.perfect_seconds / self.seconds


def replay(stats: GenerationStats, verify_ms: float, one_way_ms: float = 0.0) -> RoundReplay:
    """Replay a generation's records.

    The first round is left out, as it is of `tokens_per_second`: it waits for both services' prefixes.

    Args:
        stats: statistics with a record of every round.
        verify_ms: how long a step of the target waits.
        one_way_ms: delay on the way to either service, and back.
    """
    first, *records = stats.records
    trip_ms = 2 * one_way_ms
    misses = [record for record in records if not is_hit(record)]
    drafting_ms = sum(record.draft.forward_ms + (trip_ms if record.proposed else 0.0) for record in misses)
    self_started = sum(record.self_started for record in records)
    perfect_ms = verify_ms * len(records) + trip_ms * (len(records) - self_started)
    tokens = stats.committed - first.accepted - 1
    return RoundReplay(
        rounds=len(records),
        hits=len(records) - len(misses),
        self_started=self_started,
        tokens=tokens,
        seconds=tokens / stats.tokens_per_second,
        ideal_seconds=(perfect_ms + drafting_ms) / 1e3,
        perfect_seconds=perfect_ms / 1e3,
    )


def pool(replays: Sequence[RoundReplay]) -> RoundReplay:
    """Add several generations up to one."""
    return RoundReplay(
        rounds=sum(each.rounds for each in replays),
        hits=sum(each.hits for each in replays),
        self_started=sum(each.self_started for each in replays),
        tokens=sum(each.tokens for each in replays),
        seconds=sum(each.seconds for each in replays),
        ideal_seconds=sum(each.ideal_seconds for each in replays),
        perfect_seconds=sum(each.perfect_seconds for each in replays),
    )


@dataclass(frozen=True)
class Losses:
    """Losses of rounds against their replay: medians, milliseconds.

    Attributes:
        self_started: of a hit's self-started round: the time between two verdicts beyond T_verify; 0 without any.
        wire: of a hit's round that was sent: from dispatch to verdict, less the target's service; 0 without any.
        target: of a hit's round: the target's service beyond T_verify.
        deciding: of a hit's round that was sent: all else, the acceptance rule and the planning.
        drafting: of a miss: its wait for the draft beyond the steps that the draft took for it; 0 without misses.
    """

    self_started: float
    wire: float
    target: float
    deciding: float
    drafting: float


def losses(records: Sequence[RoundRecord], verify_ms: float) -> Losses:
    """Measure the losses of rounds after the first; at least one of them is a hit."""
    hits = [record for record in records if is_hit(record)]
    misses = [record for record in records if not is_hit(record) and record.proposed]
    self_started = [record.round_ms - verify_ms for record in hits if record.self_started]
    sent_rounds = [record for record in hits if not record.self_started]
    return Losses(
        self_started=median(self_started) if self_started else 0.0,
        wire=median(record.wire_ms for record in sent_rounds) if sent_rounds else 0.0,
        target=median(record.target.service_ms - verify_ms for record in hits),
        deciding=median(record.draft_wait_ms + record.accept_ms for record in sent_rounds) if sent_rounds else 0.0,
        drafting=median(record.draft_wait_ms - record.draft.forward_ms for record in misses) if misses else 0.0,
    )


def run_pair(on: Client, off: Client, request: GenerateRequest) -> tuple[Generation, Generation]:
    """Run the same request with overlap and without.

    Raises:
        AssertionError: the texts differ.
    """
    fast, slow = on.generate(request), off.generate(request)
    if fast.token_ids != slow.token_ids:
        raise AssertionError(f"request with seed {request.seed}: overlap changed the text")
    return fast, slow
