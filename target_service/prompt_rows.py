"""Log-probabilities of a prompt's own tokens: which rows of a prefix have logits, and what is reported of them. Pure.

Row i of a prompt gives the probability of its token i + 1. A row from the cache has no logits, so a session computes
all rows from its first reported one on. Other sessions may share these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from paceline.engine.interface import Logits, StepItem
from paceline.protocol.target import MAX_PIECE_ROWS, PromptPiece, TargetOpen
from paceline.sampling.distribution import token_logprobs
from paceline.sampling.racing import require_finite


@dataclass(frozen=True)
class ReportedRows:
    """Rows [start, end) of a prefix whose logits are needed, and how many alternatives are reported for each."""

    start: int
    end: int
    top: int = 0

    def __len__(self) -> int:
        return max(0, self.end - self.start)

    def reusable(self, rows: int) -> int:
        """How many of the first `rows` rows may come from other sessions."""
        return min(rows, self.start) if self else rows

    def within(self, first: int, rows: int) -> range:
        """The ones within a chunk of `rows` rows from row `first` on, counted from the chunk's first row."""
        return range(max(self.start, first) - first, min(self.end, first + rows) - first)

    def cut(self, first: int, rows: int, most: int) -> int:
        """How many rows of a chunk are computed if at most `most` may have logits."""
        logit_rows = self.within(first, rows)
        return rows if len(logit_rows) <= most else logit_rows.start + most


NO_ROWS: Final = ReportedRows(0, 0)


def reported_rows(command: TargetOpen) -> ReportedRows:
    """The rows whose logits a session's coordinator asks for: those of the prompt without the ones that it has."""
    if command.prompt_logprobs is None:
        return NO_ROWS
    return ReportedRows(command.prompt_logprobs_known, command.spec.prompt_length - 1, command.prompt_logprobs)


def prompt_pieces(
    session_id: int, item: StepItem, token_ids: Sequence[int], logits: Logits, top: int
) -> tuple[PromptPiece, ...]:
    """The report on a chunk.

    Args:
        session_id: on its link.
        item: the chunk; its rows with logits are consecutive.
        token_ids: the session's prefix.
        logits: [n, V], of the item's `logit_rows`.
        top: how many alternatives are reported for each row.

    Raises:
        InvalidInput: the logits hold NaN.
    """
    if not len(logits):
        return ()
    first = item.base_length + item.logit_rows[0] + 1
    require_finite("largest logit", logits.max(axis=1))
    rows = [token_logprobs(row, token_ids[position], top) for position, row in enumerate(logits, start=first)]
    cuts = (*range(0, len(rows), MAX_PIECE_ROWS), len(rows))
    return tuple(PromptPiece(session_id, first + start, tuple(rows[start:end])) for start, end in pairwise(cuts))
