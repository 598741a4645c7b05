"""Alignment of a text with a prediction of it: the place where the text goes on, also after edits. Pure.

The text follows the prediction token by token until it departs from it. From then on each token is looked up around
the place of departure: after an insertion the text returns to that place, after a deletion or a replacement further
ahead. A block that was moved is found by its last tokens anywhere in the prediction. An edit is expected again: a
name that is changed is changed throughout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.protocol.proposal import PREDICTION
from paceline.sampling.match import LONGEST_MATCH, MAX_FOLLOWING, Match

SURE_TOKENS = 8
"""Tokens in a row that settle the text's place."""
RETURN_REACH = 32
"""Tokens behind the place of departure where a return is likelier than elsewhere."""
NEAREST = 16
"""Tokens behind the place of departure where one single token may be a return."""
SOON_TOKENS = 24
"""Tokens since the departure up to which a return nearby is likely; what takes longer is mostly new text."""
PLACE_BONUS = 8
"""Agreeing tokens that a return near the departure counts for."""
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
    """The place in a prediction where the text goes on.

    Attributes:
        place: of the next token in the prediction.
        agreement: tokens of the text, in a row, that led there.
        pending: tokens that are expected before it: the rest of a repeated edit.
    """

    place: int
    agreement: int = 0
    pending: tuple[int, ...] = ()


@dataclass(frozen=True)
class Departure:
    """The last departure of the text from the prediction: the place there, and the text's length then."""

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
        self._alignment: Alignment | None = Alignment(0)
        self._departure: Departure | None = None
        """None while the text's place is certain."""
        self._edits: dict[int, Edit] = {}
        """By the first token that they replace; a later edit replaces an earlier one."""

    def __len__(self) -> int:
        """Tokens of the text."""
        return len(self._text)

    def extend(self, tokens: Sequence[int]) -> None:
        """Follow committed tokens."""
        for token in tokens:
            next_alignment = self._expected_alignment(token)
            self._text.append(token)
            alignment = self._alignment = next_alignment or self._return_alignment()
            if self._departure is not None and alignment is not None and alignment.agreement >= SURE_TOKENS:
                self._settle(self._departure, alignment)

    def match(self) -> Match | None:
        """The prediction's next tokens; None: it has none here.

        The match's length is that of an n-gram match that is as trustworthy.
        """
        if self._alignment is None:
            return None
        following = self._continuation(self._alignment)
        return Match(self._trust(self._alignment), following, drafter=PREDICTION) if following else None

    def _trust(self, alignment: Alignment) -> int:
        departure = self._departure
        bonus = PLACE_BONUS if departure is None or self._is_near(departure, alignment.place) else 0
        return min(LONGEST_MATCH, alignment.agreement + bonus)

    def _is_near(self, departure: Departure, place: int) -> bool:
        soon = len(self._text) - departure.length <= SOON_TOKENS
        return soon and 0 <= place - departure.place <= RETURN_REACH

    def _continuation(self, alignment: Alignment) -> tuple[int, ...]:
        if not self._edits and not alignment.pending:
            return tuple(self._prediction[alignment.place : alignment.place + MAX_FOLLOWING])
        tokens, place = [*alignment.pending], alignment.place
        while len(tokens) < MAX_FOLLOWING and place < len(self._prediction):
            edit = self._edit_at(place)
            if edit is None:
                tokens.append(self._prediction[place])
                place += 1
            else:
                tokens += edit.new
                place += len(edit.old)
        return tuple(tokens[:MAX_FOLLOWING])

    def _edit_at(self, place: int) -> Edit | None:
        edit = self._edits.get(self._prediction[place])
        if edit is None:
            return None
        old = tuple(self._prediction[place : place + len(edit.old)])
        return edit if old == edit.old else None

    def _expected_alignment(self, token: int) -> Alignment | None:
        """The alignment after a token that an edit or the prediction has next; None: the text departs."""
        alignment = self._alignment
        if alignment is None:
            return None
        if alignment.pending:
            if alignment.pending[0] == token:
                return Alignment(alignment.place, alignment.agreement + 1, alignment.pending[1:])
        elif alignment.place < len(self._prediction):
            edit = self._edit_at(alignment.place)
            if edit is not None and edit.new[0] == token:
                return Alignment(alignment.place + len(edit.old), alignment.agreement + 1, edit.new[1:])
            if self._prediction[alignment.place] == token:
                if edit is not None:
                    del self._edits[token]  # not this time: it is not expected any more
                return Alignment(alignment.place + 1, alignment.agreement + 1)
        self._depart(alignment)
        return None

    def _depart(self, alignment: Alignment) -> None:
        if self._departure is None:
            self._departure = Departure(alignment.place, len(self._text))

    def _return_alignment(self) -> Alignment | None:
        """The likeliest place where the text returns to the prediction; None: no place is likely."""
        departure = self._departure
        assert departure is not None, "it has departed"
        best: Alignment | None = None
        for place in self._anchors(departure):
            alignment = Alignment(place, self._agreement(place))
            if best is None or self._trust(alignment) > self._trust(best):
                best = alignment
        return best or self._nearest_return(departure)

    def _nearest_return(self, departure: Departure) -> Alignment | None:
        """The nearest place after the last token alone, soon after the departure."""
        if len(self._text) - departure.length > SOON_TOKENS:
            return None
        try:
            place = self._prediction.index(self._text[-1], departure.place, departure.place + NEAREST)
            return Alignment(place + 1, 1)
        except ValueError:
            return None

    def _anchors(self, departure: Departure) -> Iterator[int]:
        """Places behind the text's last two tokens, the nearest to the departure first."""
        if len(self._text) < 2 or len(self._prediction) < 2:
            return
        first, second = self._array[:-1] == self._text[-2], self._array[1:] == self._text[-1]
        places = np.flatnonzero(first & second) + 2
        middle = int(places.searchsorted(departure.place))
        yield from places[middle : middle + MAX_ANCHORS].tolist()
        yield from reversed(places[max(0, middle - MAX_ANCHORS) : middle].tolist())

    def _agreement(self, place: int) -> int:
        """The number of tokens before `place` that equal the text's last ones."""
        prediction, text, end = self._prediction, self._text, len(self._text)
        most = min(place, end, LONGEST_MATCH)
        count = 0
        while count < most and prediction[place - 1 - count] == text[end - 1 - count]:
            count += 1
        return count

    def _settle(self, departure: Departure, alignment: Alignment) -> None:
        """The text's place is certain again: record what lies between there and the departure as an edit."""
        back = min(self._agreement(alignment.place), len(self._text) - departure.length)
        old = tuple(self._prediction[departure.place : alignment.place - back])
        new = tuple(self._text[departure.length : len(self._text) - back])
        if 0 < len(old) <= LONGEST_EDIT and 0 < len(new) <= LONGEST_EDIT:
            self._edits[old[0]] = Edit(old, new)
        self._departure = None
