"""Services on simulated models, in processes of their own, and requests to them.

A simulated model is a table that waits where a real one computes. So the times are those that the benchmark states,
and two cores serve every process.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.protocol.proposal import AUTO, MODEL
from paceline.protocol.records import GenerationStats

OFF = SpeculationSettings(off=True)


@dataclass(frozen=True)
class SimulatedPair:
    """A target and a draft of it: named distributions with stated times, milliseconds."""

    draft_distribution: str
    verify_ms: float
    draft_ms: float
    target_row_ms: float = 0.0
    draft_row_ms: float = 0.0

    @property
    def target(self) -> str:
        """Return the target's model name."""
        return _model_name("distribution=text", self.verify_ms, self.target_row_ms)

    @property
    def draft(self) -> str:
        """Return the draft's model name."""
        return _model_name(self.draft_distribution, self.draft_ms, self.draft_row_ms)

    @property
    def drafter(self) -> str:
        """Return the drafter as `paceline serve` takes it."""
        return f"{AUTO}:{self.draft}"


def _model_name(distribution: str, step_ms: float, row_ms: float) -> str:
    return f"table:{distribution},step_ms={step_ms:g},row_ms={row_ms:g}"


def request(number: int, tokens: int, speculation: SpeculationSettings) -> GenerateRequest:
    """Return a request of the benchmark: its number gives prompt and seed, and its text ends only at `tokens`."""
    prompt = tuple((37 * number + 11 * place) % 256 for place in range(8))
    return GenerateRequest(
        token_ids=prompt, seed=number, max_new_tokens=tokens, ignore_eos=True, speculation=speculation
    )


def drafted(k: int | None) -> SpeculationSettings:
    """Return settings of the model drafter with k tokens a round; None: the policy chooses drafter and k."""
    return SpeculationSettings() if k is None else SpeculationSettings(drafter=MODEL, num_draft_tokens=k)


def share_of_ideal(stats: GenerationStats, verify_ms: float) -> float:
    """Return the time of a generation's rounds at no cost of coordination, over the time that they took.

    A round then costs T_verify; if its proposal was not there when the verdict before it came, also the draft's
    steps for it. The first round is left out, as it is of `tokens_per_second`: it waits for the prompt.
    """
    first, *records = stats.records
    misses = [record for record in records if not (record.cache_hit and record.proposed)]
    ideal_ms = verify_ms * len(records) + sum(record.draft.forward_ms for record in misses)
    return ideal_ms * stats.tokens_per_second / (1e3 * (stats.committed - first.accepted - 1))
