"""Branching points, at which a draft parts from its target: kinds of text, choices, places. Pure.

A position's loss is the chance that the drafted token is not the one that the target draws there, under the rule of
coupled acceptance (docs/exactness.md §1a): 1 - `DrafterPositions.accepted`. A round ends at the first such token.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline_lab.predict.positions import DrafterPositions, TextPositions
from paceline_training.corpus import Role, Row
from paceline_training.text_kinds import CELLS, TextKinds

PAIRS, POINTS, TEXTS = 40, 100, 8
"""Most pairs of choices, single places and whole texts of a report. Chosen, not tuned."""
BEFORE_CHARACTERS = 48
"""Length of the text that is shown in front of a place."""


@dataclass(frozen=True)
class CellLosses:
    """Losses in one kind of text, or in all.

    Attributes:
        positions: number of positions of the kind.
        lost: expected number of drafted tokens among them that the target doesn't draw.
        tv: mean total variation, 1 - Σ min(p, q).
        kl: mean KL(p ‖ q) in nats.
    """

    positions: int
    lost: float
    tv: float
    kl: float


@dataclass(frozen=True)
class ChoicePair:
    """Two most probable tokens that differ, the number of such positions, and the tokens that were lost there."""

    target: str
    draft: str
    positions: int
    lost: float
    cell: str
    """The most frequent cell of those positions."""


@dataclass(frozen=True)
class BranchToken:
    """One position.

    Attributes:
        text: the token that the target drew.
        target, draft: the most probable token of each.
        p, q: the probability that each gives to the target's draw.
        lost: chance that a token drafted here is not accepted.
    """

    text: str
    target: str
    draft: str
    p: float
    q: float
    tv: float
    kl: float
    lost: float
    cell: str


@dataclass(frozen=True)
class BranchPoint:
    """A position at which much is lost, and its place: text, token, the text in front of it."""

    number: int
    place: int
    temperature: float
    before: str
    token: BranchToken


@dataclass(frozen=True)
class Branching:
    """The branching points of one drafter.

    Attributes:
        whole: losses at all positions.
        cells: losses by `PART/KIND` of text, the greatest first.
        pairs: pairs of choices that differ, the greatest loss first.
        points: single places, the greatest loss first, then the greatest KL.
        texts: some whole texts, position by position.
    """

    whole: CellLosses
    cells: dict[str, CellLosses]
    pairs: tuple[ChoicePair, ...]
    points: tuple[BranchPoint, ...]
    texts: tuple[tuple[BranchToken, ...], ...]


def branching(texts: Sequence[TextPositions], drafter: str, kinds: TextKinds) -> Branching:
    """Fold a drafter's positions on a sample of at least one text."""
    read = [_Read(text, text.drafters[drafter], kinds) for text in texts]
    cells = np.concatenate([each.cells for each in read])
    losses, tv, kl = (np.concatenate([getattr(each, name) for each in read]) for name in ("losses", "tv", "kl"))
    every = {cell: _losses(cells == cell, losses, tv, kl) for cell in CELLS if (cells == cell).any()}
    return Branching(
        _losses(np.ones(cells.size, np.bool_), losses, tv, kl),
        dict(sorted(every.items(), key=lambda item: -item[1].lost)),
        _pairs(read),
        _points(read),
        tuple(tuple(each.token(place) for place in range(each.losses.size)) for each in read[:TEXTS]),
    )


def row_of(text: TextPositions) -> Row:
    """Return a text as a row whose loss is over its positions."""
    roles = np.full(text.tokens.size, Role.FORCED, np.int8)
    roles[text.target.places] = text.target.roles
    return Row(text.tokens, roles, text.temperature)


class _Read:
    """A text with one drafter's positions."""

    def __init__(self, text: TextPositions, drafter: DrafterPositions, kinds: TextKinds) -> None:
        self.text = text
        self.drafter = drafter
        self.kinds = kinds
        self.cells = np.array(kinds.cells(row_of(text)))  # [n]
        self.losses = 1 - drafter.accepted  # [n]
        self.tv = 1 - drafter.overlaps  # [n]
        self.kl = drafter.divergences  # [n]

    def token(self, place: int) -> BranchToken:
        target, drafter = self.text.target, self.drafter
        return BranchToken(
            text=self._text_of(target.tokens[place]),
            target=self._text_of(target.tops[place]),
            draft=self._text_of(drafter.tops[place]),
            p=_short(target.chances[place]),
            q=_short(drafter.chances[place]),
            tv=_short(self.tv[place]),
            kl=_short(self.kl[place]),
            lost=_short(self.losses[place]),
            cell=str(self.cells[place]),
        )

    def before(self, place: int) -> str:
        """Return the end of the text in front of a position."""
        end = int(self.text.target.places[place])
        pieces = [self._text_of(token) for token in self.text.tokens[max(0, end - BEFORE_CHARACTERS) : end]]
        return "".join(pieces)[-BEFORE_CHARACTERS:]

    def _text_of(self, token: int | np.integer) -> str:
        return self.kinds.text(int(token)) if token >= 0 else ""


def _losses(
    mask: NDArray[np.bool_], losses: NDArray[np.float64], tv: NDArray[np.float64], kl: NDArray[np.float64]
) -> CellLosses:
    count = int(mask.sum())
    return CellLosses(count, _short(losses[mask].sum()), _short(tv[mask].mean()), _short(kl[mask].mean()))


def _short(value: float) -> float:
    """Round a figure as reports do."""
    return round(float(value), 4)


def _pairs(read: Sequence[_Read]) -> tuple[ChoicePair, ...]:
    losses: defaultdict[tuple[str, str], float] = defaultdict(float)
    cells: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for each, place in _places(read):
        token = each.token(place)
        if token.target != token.draft:
            losses[token.target, token.draft] += token.lost
            cells[token.target, token.draft][token.cell] += 1
    dearest = sorted(losses, key=lambda pair: (-losses[pair], pair))[:PAIRS]
    return tuple(
        ChoicePair(*pair, cells[pair].total(), round(losses[pair], 4), cells[pair].most_common(1)[0][0])
        for pair in dearest
    )


def _points(read: Sequence[_Read]) -> tuple[BranchPoint, ...]:
    every = sorted(_places(read), key=lambda at: (-round(at[0].losses[at[1]], 3), -at[0].kl[at[1]]))
    numbers = {id(each): number for number, each in enumerate(read)}
    return tuple(
        BranchPoint(
            numbers[id(each)],
            int(each.text.target.places[place]),
            each.text.temperature,
            each.before(place),
            each.token(place),
        )
        for each, place in every[:POINTS]
    )


def _places(read: Sequence[_Read]) -> Iterator[tuple[_Read, int]]:
    for each in read:
        for place in range(each.losses.size):
            yield each, place
