"""The best of a row, against sorting it."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.protocol.errors import InvalidInput
from paceline.sampling.ranking import largest_of_rows, shares
from tests.sampling.test_race import rows

INF = float("inf")


@pytest.mark.parametrize("m", [1, 2, 8, 300])
def test_the_largest_are_those_of_a_stable_sort(m: int) -> None:
    for row in rows():
        order = np.argsort(-row, kind="stable")[:m]
        expected = [int(i) for i in order if row[i] > -INF]
        (found,) = largest_of_rows(row[np.newaxis], m).tolist()
        assert found == expected + [-1] * (m - len(expected))


def test_shares_are_the_softmax() -> None:
    for row in (row.astype(np.float32) for row in rows()):
        ids = largest_of_rows(row[np.newaxis], 4)
        for divisor in (1.0, 0.7, 3.0):
            exact = np.exp((row.astype(np.float64) - float(row.max())) / divisor)
            expected = np.where(ids[0] < 0, 0, (exact / exact.sum())[ids[0]])
            (found,) = shares(row[np.newaxis], ids, divisor)
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-30)


def test_rows_have_shares_of_their_own() -> None:
    rows_ = np.array([[0, 0, -INF], [5, 5, 5]], np.float32)
    assert shares(rows_, np.array([(0, -1), (2, 1)])).ravel() == pytest.approx([0.5, 0, 1 / 3, 1 / 3])


def test_at_least_one_must_be_asked_for() -> None:
    with pytest.raises(InvalidInput, match="m = 0"):
        largest_of_rows(np.zeros((1, 4), np.float32), 0)
