"""A peer's worker process and what it answers; `worker` is the other end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.protocol.errors import PacelineError
from paceline_lab.bench.worker_process import WorkerProcess


class PeerFailed(PacelineError):
    """A peer could not be installed, or has no form of the model."""


TokenIds = Sequence[int]


@dataclass(frozen=True)
class Answer:
    """Generations of any system for prompts that it got at once.

    `texts` are their token ids; `wall_s` is of all, prompts included; `target_steps` counts each text's own.
    """

    texts: tuple[tuple[int, ...], ...]
    wall_s: float
    target_steps: int


class PeerProcess(WorkerProcess):
    """One mode of a peer; its requests raise `WorkerFailed` as `ask` does."""

    def generate(self, prompts: Sequence[TokenIds], max_tokens: int, stop_token_ids: TokenIds = ()) -> Answer:
        """Run greedy generations at once, each up to `max_tokens` or the first stop id."""
        message = self.ask(
            {"prompts": [*map(list, prompts)], "max_tokens": max_tokens, "stop_token_ids": list(stop_token_ids)}
        )
        return Answer(tuple(map(tuple, message["texts"])), message["wall_s"], message["target_steps"])
