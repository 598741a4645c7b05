"""Following a prediction of the text: the place in it where the text goes on, also behind edits. Pure.

The text follows the prediction token by token until it departs from it. From then on each token is looked for around
the place of departure: an insertion comes back to that place, a deletion or a replacement further ahead. A block that
was moved is found by its last tokens anywhere in the prediction. What was replaced once is expected to be replaced
again: a name that is changed is changed throughout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.protocol.proposal import PREDICTION
from paceline.sampling.match import LONGEST_MATCH, MAX_FOLLOWING, Match

SURE_TOKENS = 8
"""Tokens in a row that settle where the text is."""
AHEAD = 32
"""Tokens behind the place of departure where a return is likelier than elsewhere."""
NEAREST = 16
"""Tokens behind the place of departure where one single token may be a return."""
SOON_TOKENS = 24
"""Tokens since the departure up to which a return nearby is likely; what takes longer is mostly new text."""
PLACE_BONUS = 8
"""Agreeing tokens that knowing the place is worth."""
MAX_ANCHORS = 4
"""Places of the last two tokens that are compared, from the place of departure on, and as many before it."""
LONGEST_EDIT = 16
"""Most tokens of what was replaced, and of what replaced it, for an edit that is expected again."""
# Tuned on 81 versions of this repository's files (30 to 93 % of the tokens kept), each the prediction of the next,
# at rows of 3 % of a step: 12 % fewer steps than by n-gram matches alone. A bonus of 2, 4, 6, 8, 12 brings 6, 9, 11,
# 12, 12 %; the others move that by less than one per cent between their halves and doubles.


@dataclass(frozen=True)
class Edit:
    """Tokens of a prediction, at least one, and those that the text had in their place, at least one."""

    old: tuple[int, ...]
    new: tuple[int, ...]


@dataclass(frozen=True)
class Alignment:
    """Where the text goes on in a prediction.

    Attributes:
        place: of the next token in the prediction.
        agreed: tokens of the text, in a row, that led there.
        pending: what is expected before that token: the rest of an edit that is made again.
    """

    place: int
    agreed: int = 0
    pending: tuple[int, ...] = ()


@dataclass(frozen=True)
class Departure:
    """Where the text last left the prediction: the place there, and how many tokens the text had."""

    place: int
    length: int


class PredictedText:
    """A prediction and the place in it where a text goes on, which grows by committed tokens.

    A token that follows the prediction costs a comparison. One that doesn't costs a scan of the prediction for the
    text's last two tokens and a look at 2 · `MAX_ANCHORS` places, over at most `LONGEST_MATCH` tokens each: 10 µs,
    and 40 µs with a prediction of 100,000 tokens.
    """

    def __init__(self, prediction: Sequence[int]) -> None:
        self._prediction = [*prediction]
        self._array = np.asarray(self._prediction, np.uint32)
        self._text: list[int] = []
        self._at: Alignment | None = Alignment(0)
        self._left: Departure | None = None
        """None while it is sure where the text is."""
        self._edits: dict[int, Edit] = {}
        """By the first token that they replace; the last one counts."""

    def __len__(self) -> int:
        """Tokens of the text."""
        return len(self._text)

    def extend(self, tokens: Sequence[int]) -> None:
        """Follow committed tokens."""
        for token in tokens:
            followed = self._followed(token)
            self._text.append(token)
            self._at = followed or self._returned()
            if self._left is not None and self._at is not None and self._at.agreed >= SURE_TOKENS:
                self._settle(self._left, self._at)

    def match(self) -> Match | None:
        """What the prediction says of the text's next tokens; None where it says nothing.

        Its length is how many agreeing tokens make an n-gram match as trustworthy.
        """
        if self._at is None:
            return None
        following = self._continuation(self._at)
        return Match(self._trust(self._at), following, drafter=PREDICTION) if following else None

    def _trust(self, at: Alignment) -> int:
        left = self._left
        return min(LONGEST_MATCH, at.agreed + (PLACE_BONUS if left is None or self._is_near(left, at.place) else 0))

    def _is_near(self, left: Departure, place: int) -> bool:
        soon = len(self._text) - left.length <= SOON_TOKENS
        return soon and 0 <= place - left.place <= AHEAD

    def _continuation(self, at: Alignment) -> tuple[int, ...]:
        if not self._edits and not at.pending:
            return tuple(self._prediction[at.place : at.place + MAX_FOLLOWING])
        found, place = [*at.pending], at.place
        while len(found) < MAX_FOLLOWING and place < len(self._prediction):
            edit = self._edit_at(place)
            if edit is None:
                found.append(self._prediction[place])
                place += 1
            else:
                found += edit.new
                place += len(edit.old)
        return tuple(found[:MAX_FOLLOWING])

    def _edit_at(self, place: int) -> Edit | None:
        edit = self._edits.get(self._prediction[place])
        if edit is None:
            return None
        found = tuple(self._prediction[place : place + len(edit.old)])
        return edit if found == edit.old else None

    def _followed(self, token: int) -> Alignment | None:
        """Where the text goes on if the token was expected, or is the prediction's own; else None: it departs."""
        at = self._at
        if at is None:
            return None
        if at.pending:
            if at.pending[0] == token:
                return Alignment(at.place, at.agreed + 1, at.pending[1:])
        elif at.place < len(self._prediction):
            edit = self._edit_at(at.place)
            if edit is not None and edit.new[0] == token:
                return Alignment(at.place + len(edit.old), at.agreed + 1, edit.new[1:])
            if self._prediction[at.place] == token:
                if edit is not None:
                    del self._edits[token]  # not this time: it is not expected any more
                return Alignment(at.place + 1, at.agreed + 1)
        self._depart(at)
        return None

    def _depart(self, at: Alignment) -> None:
        if self._left is None:
            self._left = Departure(at.place, len(self._text))

    def _returned(self) -> Alignment | None:
        """The likeliest place where the text, which has departed, goes on; None: nothing speaks for any."""
        left = self._left
        assert left is not None, "it has departed"
        best: Alignment | None = None
        for place in self._anchors(left):
            found = Alignment(place, self._agreement(place))
            if best is None or self._trust(found) > self._trust(best):
                best = found
        return best or self._single(left)

    def _single(self, left: Departure) -> Alignment | None:
        """The nearest place behind the last token alone, soon after the departure."""
        if len(self._text) - left.length > SOON_TOKENS:
            return None
        try:
            return Alignment(self._prediction.index(self._text[-1], left.place, left.place + NEAREST) + 1, 1)
        except ValueError:
            return None

    def _anchors(self, left: Departure) -> Iterator[int]:
        """Places behind the text's last two tokens, the nearest to the departure first."""
        if len(self._text) < 2 or len(self._prediction) < 2:
            return
        first, second = self._array[:-1] == self._text[-2], self._array[1:] == self._text[-1]
        places = np.flatnonzero(first & second) + 2
        here = int(places.searchsorted(left.place))
        yield from places[here : here + MAX_ANCHORS].tolist()
        yield from reversed(places[max(0, here - MAX_ANCHORS) : here].tolist())

    def _agreement(self, place: int) -> int:
        """How many tokens before `place` equal the text's last ones."""
        prediction, text, end = self._prediction, self._text, len(self._text)
        most = min(place, end, LONGEST_MATCH)
        agreed = 0
        while agreed < most and prediction[place - 1 - agreed] == text[end - 1 - agreed]:
            agreed += 1
        return agreed

    def _settle(self, left: Departure, at: Alignment) -> None:
        """It is sure where the text is again: what stands between there and the departure was an edit."""
        back = min(self._agreement(at.place), len(self._text) - left.length)
        old = tuple(self._prediction[left.place : at.place - back])
        new = tuple(self._text[left.length : len(self._text) - back])
        if 0 < len(old) <= LONGEST_EDIT and 0 < len(new) <= LONGEST_EDIT:
            self._edits[old[0]] = Edit(old, new)
        self._left = None
