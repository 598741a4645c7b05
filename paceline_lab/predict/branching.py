"""Where a draft parts from its target, token by token: which kinds of text, which choices, which places. Pure.

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
"""Most pairs of choices, single places and whole texts that a report tells. Chosen, not tuned."""
BEFORE_CHARACTERS = 48
"""Of the text in front of a place."""


@dataclass(frozen=True)
class CellLosses:
    """What is lost in one kind of text, or in all.

    Attributes:
        positions: of the kind.
        lost: expected drafted tokens among them that the target doesn't draw.
        tv: mean total variation, 1 - Σ min(p, q).
        kl: mean KL(p ‖ q) in nats.
    """

    positions: int
    lost: float
    tv: float
    kl: float


@dataclass(frozen=True)
class ChoicePair:
    """Two most probable tokens that differ: positions where it was so, and what was lost there."""

    target: str
    draft: str
    positions: int
    lost: float
    cell: str
    """The most frequent one."""


@dataclass(frozen=True)
class ToldToken:
    """One position.

    Attributes:
        text: what the target drew.
        target, draft: their most probable tokens.
        p, q: their probabilities of what the target drew.
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
    """A position at which much is lost, and where it is: text, token, the text in front of it."""

    number: int
    place: int
    temperature: float
    before: str
    token: ToldToken


@dataclass(frozen=True)
class Branching:
    """Where one drafter parts from the target.

    Attributes:
        whole: of all positions.
        cells: by `PART/KIND` of text, the greatest loss first.
        pairs: of choices that differ, the greatest loss first.
        points: places, the greatest loss first, then the greatest KL.
        texts: some texts whole, position by position.
    """

    whole: CellLosses
    cells: dict[str, CellLosses]
    pairs: tuple[ChoicePair, ...]
    points: tuple[BranchPoint, ...]
    texts: tuple[tuple[ToldToken, ...], ...]


def branching(texts: Sequence[TextPositions], drafter: str, kinds: TextKinds) -> Branching:
    """Fold a drafter's positions on a sample; there are some."""
    read = [_Read(text, text.drafters[drafter], kinds) for text in texts]
    cells = np.concatenate([each.cells for each in read])
    lost, tv, kl = (np.concatenate([getattr(each, name) for each in read]) for name in ("lost", "tv", "kl"))
    every = {cell: _losses(cells == cell, lost, tv, kl) for cell in CELLS if (cells == cell).any()}
    return Branching(
        _losses(np.ones(cells.size, np.bool_), lost, tv, kl),
        dict(sorted(every.items(), key=lambda item: -item[1].lost)),
        _pairs(read),
        _points(read),
        tuple(tuple(each.token(place) for place in range(each.lost.size)) for each in read[:TEXTS]),
    )


def row_of(text: TextPositions) -> Row:
    """A read text as a row that learns its positions."""
    roles = np.full(text.tokens.size, Role.FORCED, np.int8)
    roles[text.target.places] = text.target.roles
    return Row(text.tokens, roles, text.temperature)


class _Read:
    """One text with one drafter's positions."""

    def __init__(self, text: TextPositions, drafter: DrafterPositions, kinds: TextKinds) -> None:
        self.text = text
        self.drafter = drafter
        self.kinds = kinds
        self.cells = np.array(kinds.cells(row_of(text)))  # [n]
        self.lost = 1 - drafter.accepted  # [n]
        self.tv = 1 - drafter.overlaps  # [n]
        self.kl = drafter.divergences  # [n]

    def token(self, place: int) -> ToldToken:
        target, drafter = self.text.target, self.drafter
        return ToldToken(
            text=self._written(target.tokens[place]),
            target=self._written(target.tops[place]),
            draft=self._written(drafter.tops[place]),
            p=_short(target.chances[place]),
            q=_short(drafter.chances[place]),
            tv=_short(self.tv[place]),
            kl=_short(self.kl[place]),
            lost=_short(self.lost[place]),
            cell=str(self.cells[place]),
        )

    def before(self, place: int) -> str:
        """The end of the text in front of a position."""
        end = int(self.text.target.places[place])
        pieces = [self._written(token) for token in self.text.tokens[max(0, end - BEFORE_CHARACTERS) : end]]
        return "".join(pieces)[-BEFORE_CHARACTERS:]

    def _written(self, token: int | np.integer) -> str:
        return self.kinds.text(int(token)) if token >= 0 else ""


def _losses(
    chosen: NDArray[np.bool_], lost: NDArray[np.float64], tv: NDArray[np.float64], kl: NDArray[np.float64]
) -> CellLosses:
    count = int(chosen.sum())
    return CellLosses(count, _short(lost[chosen].sum()), _short(tv[chosen].mean()), _short(kl[chosen].mean()))


def _short(value: float) -> float:
    """As reports have it."""
    return round(float(value), 4)


def _pairs(read: Sequence[_Read]) -> tuple[ChoicePair, ...]:
    lost: defaultdict[tuple[str, str], float] = defaultdict(float)
    cells: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for each, place in _places(read):
        told = each.token(place)
        if told.target != told.draft:
            lost[told.target, told.draft] += told.lost
            cells[told.target, told.draft][told.cell] += 1
    dearest = sorted(lost, key=lambda pair: (-lost[pair], pair))[:PAIRS]
    return tuple(
        ChoicePair(*pair, cells[pair].total(), round(lost[pair], 4), cells[pair].most_common(1)[0][0])
        for pair in dearest
    )


def _points(read: Sequence[_Read]) -> tuple[BranchPoint, ...]:
    every = sorted(_places(read), key=lambda at: (-round(at[0].lost[at[1]], 3), -at[0].kl[at[1]]))
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
        for place in range(each.lost.size):
            yield each, place
