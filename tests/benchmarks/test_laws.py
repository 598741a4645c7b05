"""The named laws behave like the drafts that they are named for, in every column and under the services' own race."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from benchmarks.likeness import GUESSES, MEASURED, Columns, columns
from benchmarks.simulated.distributions import Table, raced_ranks, table_of
from paceline.models.table_names import TableSpec

DRAWS = 6
TOLERANCE = 0.015
MISMATCH_TOLERANCE = 0.025
"""A tenth to a third of the draws are mismatches, so their columns are that much less certain."""


@cache
def text() -> Table:
    return table_of(TableSpec.parse("law=text"))


def columns_of(draft: str, draws: int = DRAWS) -> Columns:
    table = table_of(TableSpec.parse(draft))
    return columns(text(), table, raced_ranks(text(), table, draws))


@pytest.mark.parametrize("name", ["close", "middling"])
def test_a_named_law_has_the_measured_columns(name: str) -> None:
    found, measured = columns_of(f"law={name}"), MEASURED[name]
    assert found.overlap == pytest.approx(measured.overlap, abs=TOLERANCE)
    assert found.best == pytest.approx(measured.best, abs=TOLERANCE)
    assert found.after_mismatch == pytest.approx(measured.after_mismatch, abs=MISMATCH_TOLERANCE)


def test_equal_overlap_is_not_enough() -> None:
    """Mixing in a second table can have middling's overlap, and makes outcomes easier to guess than they are."""
    mixed, measured = columns_of("law=text,noise=0.15", draws=3), MEASURED["middling"]
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
    assert found.top[:2] == pytest.approx((0.3, 0.8))
