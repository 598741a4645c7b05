"""What kind of text a token is: which part of an answer it stands in, and what it is made of.

Drafts part from their targets by kind: they know how a word goes on, and not which number comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from paceline.models.tokenizer import Tokenizer
from paceline_training.corpus import Role, Row

FENCE = "```"
"""Opens and closes code in Markdown."""


class AnswerPart(StrEnum):
    """Where in an answer a token stands."""

    TEXT = "text"
    CODE = "code"
    """Between fences."""
    REASONING = "reasoning"


class TokenKind(StrEnum):
    """What a token is made of."""

    SPACE = "white space"
    NUMBER = "number"
    PUNCTUATION = "punctuation"
    WORD_START = "word start"
    WORD_INSIDE = "word inside"
    """Letters right behind letters or digits."""
    SPECIAL = "special"
    """No text: ends of turns, marks of reasoning that are special."""


CELLS = tuple(f"{part}/{kind}" for part in AnswerPart for kind in TokenKind)
"""Every part with every kind."""


class TextKinds:
    """Sorts the tokens of texts into cells. Keeps the text of every token that it has met."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        """The text of a single token; empty for special tokens."""
        if token_id not in self._texts:
            self._texts[token_id] = self._tokenizer.text_bytes(token_id).decode("utf-8", "replace")
        return self._texts[token_id]

    def cells(self, row: Row) -> list[str]:
        """`PART/KIND` of each learned token but a text's first, in order."""
        kinds = self._kinds(row.token_ids.tolist())
        code_mask = self._code_mask(row)
        places = np.flatnonzero(row.loss_mask[1:]) + 1
        return [f"{_part(int(row.roles[at]), bool(code_mask[at]))}/{kinds[at]}" for at in places]

    def _kinds(self, tokens: Sequence[int]) -> list[TokenKind]:
        kinds: list[TokenKind] = []
        previous = ""
        for token in tokens:
            text = self.text(token)
            kinds.append(kind_of(text, previous))
            previous = text or " "  # a special token ends words
        return kinds

    def _code_mask(self, row: Row) -> NDArray[np.bool_]:
        """[length] whether a fence is open in front of each token, in the assistant's text alone."""
        mask = np.zeros(len(row.token_ids), np.bool_)
        tail, is_open = "", False
        for at, token in enumerate(row.token_ids.tolist()):
            if row.roles[at] < Role.ANSWER:
                tail, is_open = "", False
                continue
            mask[at] = is_open
            tail += self.text(token)
            is_open ^= tail.count(FENCE) % 2 == 1
            # What a fence may still be completed from: fewer characters than it has, and none that it had.
            tail = tail.rpartition(FENCE)[2][-(len(FENCE) - 1) :]
        return mask


def _part(role: int, in_code: bool) -> AnswerPart:
    if role == Role.THINKING:
        return AnswerPart.REASONING
    return AnswerPart.CODE if in_code else AnswerPart.TEXT


def kind_of(text: str, previous: str) -> TokenKind:
    """The kind of a token's text behind another token's.

    The first character that is no white space decides. A mark such as an underscore is punctuation.
    """
    if not text:
        return TokenKind.SPECIAL
    bare = text.lstrip()
    if not bare:
        return TokenKind.SPACE
    if bare[0].isnumeric():
        return TokenKind.NUMBER
    if not bare[0].isalpha():
        return TokenKind.PUNCTUATION
    continues_word = bare == text and previous[-1:].isalnum()
    return TokenKind.WORD_INSIDE if continues_word else TokenKind.WORD_START
