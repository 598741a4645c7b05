"""A peer's worker process and what it answers; `worker` is the other end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.protocol.errors import PacelineError
from paceline_lab.bench.worker_process import WorkerProcess


class PeerFailed(PacelineError):
    """A peer could not be installed, or has no form of the model."""


@dataclass(frozen=True)
class Answer:
    """One generation of any system; `wall_s` includes the prompt."""

    token_ids: tuple[int, ...]
    wall_s: float
    target_steps: int


class PeerProcess(WorkerProcess):
    """One mode of a peer; its requests raise `WorkerFailed` as `ask` does."""

    def generate(self, token_ids: Sequence[int], max_tokens: int, stop_token_ids: Sequence[int] = ()) -> Answer:
        """Run one greedy generation, up to `max_tokens` or the first stop id."""
        message = self.ask(
            {"token_ids": list(token_ids), "max_tokens": max_tokens, "stop_token_ids": list(stop_token_ids)}
        )
        return Answer(tuple(message["token_ids"]), message["wall_s"], message["target_steps"])
