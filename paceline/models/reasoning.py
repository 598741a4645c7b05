"""Which tokens of a text are reasoning: those between the markers that the model has as tokens of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.models.tokenizer import Tokenizer

TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
)
"""What models' templates are known to write around reasoning."""


@dataclass(frozen=True)
class ReasoningMarks:
    """The two tokens around a span of reasoning. A text's spans follow from its token ids alone.

    Attributes:
        opening, closing: token ids; both are part of the span.
        borders: the other special tokens, which end turns: what stands before the last one opens nothing.
    """

    opening: int
    closing: int
    borders: frozenset[int] = frozenset()

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ReasoningMarks | None:
        """The first known pair that are tokens; None: the model has none."""
        tokens = tokenizer.added_tokens
        for opening, closing in TAGS:
            if opening in tokens and closing in tokens:
                marks = tokens[opening], tokens[closing]
                return cls(*marks, frozenset(tokenizer.hidden_tokens) - {*marks})
        return None

    def open_behind(self, token_ids: Sequence[int]) -> bool:
        """Whether a prompt's last turn opens a span and leaves it open."""
        for token_id in reversed(token_ids):
            if token_id in (self.opening, self.closing) or token_id in self.borders:
                return token_id == self.opening
        return False

    def open_after(self, token_id: int, *, before: bool) -> bool:
        """Whether a span is open behind a token; `before`: whether one was in front of it."""
        return token_id == self.opening or (before and token_id != self.closing)

    def inside(self, token_ids: Iterable[int], *, before: bool) -> list[bool]:
        """For each token whether it is part of a span; `before`: whether one is open in front of the first."""
        found: list[bool] = []
        for token_id in token_ids:
            after = self.open_after(token_id, before=before)
            found.append(before or after)
            before = after
        return found
