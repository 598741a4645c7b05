"""The named distributions are as like as the models that they were fitted to, under the services' own race."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.engine.table.engine import TableModel
from paceline.models.table_names import TableSpec
from paceline.protocol.sampling import NoiseKey
from paceline.sampling.noise import Stream
from paceline.sampling.racing import race, race_best
from paceline_lab.bench.ab.experiments import DRAFT_OF_ACCEPTANCE

Table = NDArray[np.float32]
"""Logits [contexts, V]."""

GUESSES = (1, 2, 4, 8)
DRAWS = 6
TOLERANCE = 0.015
MISMATCH_TOLERANCE = 0.025
"""A tenth to a third of the draws are mismatches, so their columns are that much less certain."""


@dataclass(frozen=True)
class Columns:
    """How a draft q relates to its target p at temperature 1: means over contexts, an entry for each of `GUESSES`.

    overlap: 1 - TV. best m: the target's token is among the draft's m best under shared noise; m = 1 is the coupled
    match. after_mismatch m: the draft's first was wrong, the target's is among its next m.
    """

    overlap: float
    best: tuple[float, ...]
    after_mismatch: tuple[float, ...]


MEASURED = {
    "close": Columns(0.909, (0.889, 0.972, 0.997, 1.0), (0.751, 0.925, 0.987, 0.999)),
    "middling": Columns(0.746, (0.714, 0.866, 0.946, 0.986), (0.530, 0.715, 0.876, 0.958)),
}
"""SmolLM2-135M on its own text, 1,100 positions with 8 draws of noise each; the drafts are the model with disturbed
weights or dropped layers. The named distributions were fitted to these (`paceline.models.table_names`)."""


def chances(ranks: NDArray[np.int64], guesses: int) -> tuple[float, float]:
    """How often the target's token is among so many guesses: after accepted tokens, and after a mismatch."""
    wrong = ranks[ranks > 1]
    return float((ranks <= guesses).mean()), float((wrong <= 1 + guesses).mean())


def columns(target: Table, draft: Table, ranks: NDArray[np.int64]) -> Columns:
    """The columns of a pair; `ranks` are the target's tokens' ranks under shared noise, 1 the best."""
    p, q = _softmax(target), _softmax(draft)
    guessed = [chances(ranks, m) for m in GUESSES]
    return Columns(
        overlap=float(np.minimum(p, q).sum(axis=1).mean()),
        best=tuple(bonus for bonus, _ in guessed),
        after_mismatch=tuple(recovered for _, recovered in guessed),
    )


def _softmax(logits: Table) -> NDArray[np.float64]:
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True), np.float64)


def table_of(spec: TableSpec) -> Table:
    """Every row of a distribution's table."""
    model = TableModel(spec)
    return np.stack([model.context(row) for row in range(spec.contexts)])


def raced_ranks(target: Table, draft: Table, draws: int) -> NDArray[np.int64]:
    """Ranks [draws · contexts] by the services' own race; beyond the most guesses all ranks count as one."""
    last = max(GUESSES) + 2
    ranks = []
    for draw in range(draws):
        key = NoiseKey(0, draw)
        for position, (p, q) in enumerate(zip(target, draft, strict=True)):
            token = race(p, key, Stream.DRAFT, position)
            best = race_best(q, last - 1, key, Stream.DRAFT, position)
            ranks.append(1 + best.index(token) if token in best else last)
    return np.array(ranks)


@cache
def text() -> Table:
    return table_of(TableSpec.parse("distribution=text"))


def columns_of(draft: str, draws: int = DRAWS) -> Columns:
    table = table_of(TableSpec.parse(draft))
    return columns(text(), table, raced_ranks(text(), table, draws))


@pytest.mark.parametrize("name", [pytest.param("close", marks=pytest.mark.full), "middling"])
def test_a_named_distribution_has_the_measured_columns(name: str) -> None:
    found, measured = columns_of(f"distribution={name}"), MEASURED[name]
    assert found.overlap == pytest.approx(measured.overlap, abs=TOLERANCE)
    assert found.best == pytest.approx(measured.best, abs=TOLERANCE)
    assert found.after_mismatch == pytest.approx(measured.after_mismatch, abs=MISMATCH_TOLERANCE)


@pytest.mark.parametrize("acceptance", [pytest.param(0.8, marks=pytest.mark.full), 0.9])
def test_drafts_have_the_acceptance_that_they_are_listed_under(acceptance: float) -> None:
    assert set(DRAFT_OF_ACCEPTANCE) == {0.8, 0.9}
    draft = table_of(TableSpec.parse(DRAFT_OF_ACCEPTANCE[acceptance]))
    assert (raced_ranks(text(), draft, draws=4) == 1).mean() == pytest.approx(acceptance, abs=0.005)


@pytest.mark.full
def test_equal_overlap_is_not_enough() -> None:
    """Mixing in a second table can have middling's overlap, and makes outcomes easier to guess than they are."""
    mixed, measured = columns_of("distribution=text,noise=0.15", draws=3), MEASURED["middling"]
    assert mixed.overlap == pytest.approx(measured.overlap, abs=TOLERANCE)
    assert mixed.after_mismatch[2] > measured.after_mismatch[2] + MISMATCH_TOLERANCE


def test_columns_of_a_pair_small_enough_to_do_by_hand() -> None:
    target, draft = np.full((1, 8), -np.inf, np.float32), np.full((1, 8), -np.inf, np.float32)
    target[0, :3] = np.log([0.5, 0.3, 0.2])
    draft[0, :3] = np.log([0.3, 0.6, 0.1])
    ranks = np.array([1, 2, 2, 3])
    found = columns(target, draft, ranks)
    assert GUESSES == (1, 2, 4, 8)
    assert found.overlap == pytest.approx(0.7)
    assert found.best == pytest.approx((0.25, 0.75, 1, 1))
    assert found.after_mismatch == pytest.approx((2 / 3, 1, 1, 1))
