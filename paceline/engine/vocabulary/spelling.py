"""A text of target tokens in the draft's own tokens, brought forward token by token. Pure.

What the draft reads at a place is a function of the target tokens up to there and of nothing else, so a row that was
computed for a proposal serves once it is committed, and a branch drafted ahead is the one drafted afterwards. It is
the draft's own tokenisation of the text so far. A token more may change the last few of its tokens: what is still
open is tokenised again (`Spelling.open_text`), and is closed at a word's beginning once it is long.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from paceline.engine.vocabulary.shared import SharedVocabulary
from paceline.models.token_texts import Cutter, Piece, TokenTexts

LONG_TEXT = 64
"""Bytes of open text from which on its beginning is closed; the rest keeps half as many, so that no token that is
still to come reaches over the seam but runs of spaces. Chosen: tokenising as much takes 50 µs."""
LONGEST_TEXT = 4 * LONG_TEXT
"""Bytes of open text that are closed between any two tokens: a script without spaces."""
_STRAY_BYTE = re.compile("[\udc80-\udcff]|[^\udc80-\udcff]+")
"""A byte that is no part of a whole character, or a run of whole ones, as `surrogateescape` writes them."""
_FIRST_STRAY = 0xDC00


@dataclass(eq=False, slots=True, weakref_slot=True)
class ContextNode:
    """A token of the draft's behind others: the last of a context of `length` tokens.

    `row` is its row in the draft's engine; None: it has none.
    """

    token: int
    parent: ContextNode | None = field(repr=False)
    length: int
    row: int | None = None


class Contexts:
    """A session's contexts: equal ones are one object, for as long as anything refers to it."""

    def __init__(self) -> None:
        self._nodes: WeakValueDictionary[tuple[ContextNode | None, int], ContextNode] = WeakValueDictionary()

    def child(self, parent: ContextNode | None, token: int) -> ContextNode:
        """The context with one token more; `parent` None: the empty context."""
        node = self._nodes.get((parent, token))
        if node is None:
            node = ContextNode(token, parent, 1 if parent is None else parent.length + 1)
            self._nodes[parent, token] = node
        return node

    def descendant(self, parent: ContextNode | None, tokens: Iterable[int]) -> ContextNode | None:
        """The context with some tokens more."""
        for token in tokens:
            parent = self.child(parent, token)
        return parent


@dataclass(frozen=True, slots=True)
class Spelling:
    """The draft's context after a path of target tokens, `tip`; None: it is still empty.

    `closed_tip` ends the part that stays as it is whatever follows; `open_text` is the text behind it.
    """

    tip: ContextNode | None = None
    closed_tip: ContextNode | None = None
    open_text: bytes = b""


class Speller:
    """Spells the text of target tokens in the draft's tokens."""

    def __init__(self, target: TokenTexts, draft: TokenTexts, vocabulary: SharedVocabulary, cut: Cutter) -> None:
        self._texts = target.texts
        self._beginning = draft.beginning
        ids = dict(zip(vocabulary.target_ids.tolist(), vocabulary.draft_ids.tolist(), strict=True))
        self._special = {i: ids[i] for i in target.special if i in ids}
        self._bytes = {text[0]: i for i, text in sorted(draft.texts.items(), reverse=True) if len(text) == 1}
        self._cut = cut

    def begin(self, contexts: Contexts) -> Spelling:
        """The draft's context before any token."""
        tip = contexts.descendant(None, self._beginning)
        return Spelling(tip, tip)

    def follow(self, spelling: Spelling, token: int, contexts: Contexts) -> Spelling:
        """The draft's context after one more target token.

        A special token that the draft has too ends the text before it; others say nothing to the draft.
        """
        text = self._texts.get(token)
        if text is not None:
            return self._go_on(spelling, spelling.open_text + text, contexts)
        tip, special = spelling.tip, self._special.get(token)
        if special is not None and not self._has_begun_with(special, tip):
            tip = contexts.child(tip, special)
        return Spelling(tip, tip)

    def pieces(self, text: bytes) -> list[Piece]:
        """The draft's tokens of a text whose ends, or anything in it, may be parts of characters.

        Those are spelled byte by byte, as far as the draft has these bytes.
        """
        pieces: list[Piece] = []
        start = 0
        for run in _STRAY_BYTE.findall(text.decode("utf-8", "surrogateescape")):
            if (byte := ord(run[0]) - _FIRST_STRAY) in range(0x80, 0x100):
                if byte in self._bytes:
                    pieces.append(Piece(self._bytes[byte], start, start + 1))
                start += 1
                continue
            pieces += (Piece(token, start + low, start + high) for token, low, high in self._cut(run))
            start += len(run.encode())
        return pieces

    def _go_on(self, spelling: Spelling, text: bytes, contexts: Contexts) -> Spelling:
        pieces = self.pieces(text)
        seam = _seam(text, pieces)
        closed_tip = contexts.descendant(spelling.closed_tip, (piece.token_id for piece in pieces[:seam]))
        tip = contexts.descendant(closed_tip, (piece.token_id for piece in pieces[seam:]))
        return Spelling(tip, closed_tip, text[_start(text, pieces, seam) :])

    def _has_begun_with(self, token: int, tip: ContextNode | None) -> bool:
        """Whether the text is the draft's beginning and ends with this token, which targets may add themselves."""
        return tip is not None and tip.token == token and tip.length == len(self._beginning)


def _seam(text: bytes, pieces: Sequence[Piece]) -> int:
    """The number of closed pieces of an open text: none of a short one, all of a too long one that can't be cut."""
    if len(text) < LONG_TEXT:
        return 0
    latest = len(text) - LONG_TEXT // 2
    seams = [
        place
        for place in range(1, len(pieces))
        if pieces[place].start <= latest and pieces[place].start >= pieces[place - 1].end
    ]
    words = [place for place in seams if text[pieces[place].start : pieces[place].start + 1].isspace()]
    if len(text) < LONGEST_TEXT:
        return words[-1] if words else 0
    return [len(pieces), *seams, *words][-1]


def _start(text: bytes, pieces: Sequence[Piece], place: int) -> int:
    """The byte at which a piece begins; behind the last piece, the end of the text."""
    if not place:
        return 0
    return pieces[place].start if place < len(pieces) else len(text)
