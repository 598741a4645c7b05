"""Runners and generations with written-down figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.client import Generation
from paceline.protocol.generation import ChatMessage, FinishReason, GenerateRequest
from paceline.protocol.records import GenerationStats, RoundRecord, StepTimings
from paceline_lab.bench.prompts import Prompt

PLAIN_STEP_MS = 30.0
DRAFTED_STEP_MS = 40.0


def prompt(name: str, kind: str = "chat") -> Prompt:
    """One turn that asks its name."""
    return Prompt(kind, name, ((ChatMessage("user", name),),))


def record(rows: int, accepted: int, *, wait_ms: float = 0.0, hit: bool = False) -> RoundRecord:
    step_ms = PLAIN_STEP_MS if rows == 1 else DRAFTED_STEP_MS
    return RoundRecord(
        base_length=0,
        round_ms=step_ms + wait_ms + 1,
        draft_wait_ms=wait_ms,
        wire_ms=1.0,
        target=StepTimings(forward_ms=step_ms - 1, sample_ms=1.0, service_ms=step_ms, rows=rows, sessions=1),
        accept_ms=0.0,
        proposed=rows - 1,
        accepted=accepted,
        cache_hit=hit,
    )


def generation(tokens: Sequence[int], records: Sequence[RoundRecord], tokens_per_second: float) -> Generation:
    spec = [each for each in records if each.proposed]
    stats = GenerationStats(
        rounds=len(records),
        committed=len(tokens),
        cache_hits=sum(each.cache_hit for each in records),
        time_to_first_token_ms=50.0,
        tokens_per_second=tokens_per_second,
        num_spec_steps=len(spec),
        num_draft_tokens=sum(each.proposed for each in spec),
        num_accepted_draft_tokens=sum(each.accepted for each in spec),
        records=tuple(records),
    )
    return Generation("", tuple(tokens), (1,), FinishReason.LENGTH, 0, (), stats)


@dataclass
class FakeRunner:
    """Answers with one text; speculating requests take 4 rounds of 4 tokens, others 16 of one."""

    name: str
    target_threads: int = 2
    calls: list[tuple[str, GenerateRequest]] = field(default_factory=list)
    text: tuple[int, ...] = tuple(range(16))
    drafted_text: tuple[int, ...] = tuple(range(16))
    processes: Sequence[int] = ()
    start_s: float = 0.5

    def generate(self, request: GenerateRequest) -> Generation:
        self.calls.append((self.name, request))
        if request.speculation.off:
            return generation(self.text, [record(1, 0)] * 16, 20.0)
        rounds = [record(5, 3, wait_ms=2.0, hit=number > 0) for number in range(4)]
        return generation(self.drafted_text, rounds, 50.0)
