"""Services on simulated models, in processes of their own, and what is asked of them.

A simulated model is a table that waits where a real one computes, so the times are those that the
benchmark states and two cores serve every process.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.local.services import LocalServices
from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.protocol.proposal import MODEL
from paceline.protocol.records import RoundRecord

START_SECONDS = 120.0
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
        """The target's model name."""
        return _model_name("distribution=text", self.verify_ms, self.target_row_ms)

    @property
    def draft(self) -> str:
        """The draft's model name."""
        return _model_name(self.draft_distribution, self.draft_ms, self.draft_row_ms)


def _model_name(distribution: str, step_ms: float, row_ms: float) -> str:
    return f"table:{distribution},step_ms={step_ms:g},row_ms={row_ms:g}"


class ModelServices(LocalServices):
    """A target and a draft service on named models; coordinators come and go beside them."""

    def __init__(self, folder: Path, target: str, draft: str) -> None:
        super().__init__(folder, start_timeout_s=START_SECONDS)
        self._target, self._draft = target, draft

    @classmethod
    def of(cls, folder: Path, pair: SimulatedPair) -> ModelServices:
        """On simulated models."""
        return cls(folder, pair.target, pair.draft)

    def start_all(self) -> None:
        """Start both, and wait for them."""
        self.start("target", "target", {"model": self._target, "server.port": 0})
        self.start("draft", "draft", {"drafters": [f"{MODEL}:{self._draft}"], "server.port": 0})
        self.await_serving("target", "draft")


def request(number: int, tokens: int, speculation: SpeculationSettings) -> GenerateRequest:
    """One of the benchmark's requests: prompt and seed from its number, and text that ends only at `tokens`."""
    prompt = tuple((37 * number + 11 * place) % 256 for place in range(8))
    return GenerateRequest(
        token_ids=prompt, seed=number, max_new_tokens=tokens, ignore_eos=True, speculation=speculation
    )


def drafted(k: int | None) -> SpeculationSettings:
    """The model drafter with k tokens a round; None: the policy chooses drafter and k."""
    return SpeculationSettings() if k is None else SpeculationSettings(drafter=MODEL, num_draft_tokens=k)


def is_hit(record: RoundRecord) -> bool:
    """Whether a token that was drafted for the round's outcome was there when the verdict was."""
    return record.cache_hit and record.proposed > 0
