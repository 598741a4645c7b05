"""What a prompt's log-probabilities should be, without any service, and how a test collects those that are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from paceline.engine.table.engine import TableModel
from paceline.protocol.target import PromptPiece, RowLogprobs, TargetOpen, TargetOpened
from tests.engine import tiny
from tests.services.harness import LAW, Events

TOP = 3
CLOSE = 2e-4
"""Between forward passes of a tiny float32 model over other numbers of rows: logits of up to 60 differ by 1e-5 or so.

A neighbour's row, or another token's entry, differs by more than 0.1 nearly everywhere.
"""


@dataclass(frozen=True)
class DirectReport:
    """Log-probabilities [P - 1, V] of one whole forward pass."""

    logprobs: np.ndarray[tuple[int, int], np.dtype[np.float64]]

    def differs(self, prompt: Sequence[int], rows: Sequence[RowLogprobs], first: int = 1) -> float:
        """The largest difference of rows from position `first` on; infinity where ids or lengths aren't right."""
        worst = 0.0
        for position, row in enumerate(rows, start=first):
            direct = self.logprobs[position - 1]
            best = np.sort(direct)[::-1][: len(row.token_ids) - 1]
            if row.token_ids[0] != prompt[position] or len(set(row.token_ids[1:])) != len(row.token_ids) - 1:
                return float("inf")
            off = [direct[token] - logprob for token, logprob in zip(row.token_ids, row.logprobs, strict=True)]
            # Equals may be told in any order, so the best are compared by value.
            off += list(best - np.array(row.logprobs[1:]))
            worst = max(worst, float(np.abs(off).max()))
        return worst


def by_table(prompt: Sequence[int], law: TableModel = LAW) -> DirectReport:
    """Of a table model."""
    logits = np.stack([law.logits(prompt[:end]) for end in range(1, len(prompt))]).astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    return DirectReport(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


@torch.inference_mode()
def by_transformers(model: PreTrainedModel, prompt: Sequence[int], vocab_size: int = tiny.VOCAB) -> DirectReport:
    """Of transformers' own forward pass over the whole prompt at once."""
    logits = model(input_ids=torch.tensor([list(prompt)]), use_cache=False).logits[0, :-1, :vocab_size]
    return DirectReport(logits.double().log_softmax(dim=1).numpy())


async def reported(events: Events, opening: TargetOpen) -> tuple[list[PromptPiece], TargetOpened]:
    """Open a session; its pieces, all of which come before it is opened."""
    opened = await events.answer(opening, TargetOpened)
    return events.take_all(PromptPiece, opening.session_id), opened


def rows_of(pieces: Sequence[PromptPiece], known: int = 0) -> list[RowLogprobs]:
    """The rows of pieces without a gap."""
    rows: list[RowLogprobs] = []
    for piece in pieces:
        assert piece.first_position == known + len(rows) + 1, "each piece follows the one before it"
        rows += piece.rows
    return rows
