"""The arithmetic of reports, against cases known by other means."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from paceline_lab.reporting.figures import Spread, lower_bound, percentile


def exact_lower_bound(values: list[float]) -> float:
    """The 5 % quantile of the bootstrap distribution of the median, by enumerating all n^n samples."""
    medians = [float(np.median(sample)) for sample in itertools.product(values, repeat=len(values))]
    return float(np.percentile(medians, 5))


@pytest.mark.parametrize("values", [[1.0, 2.0, 4.0], [0.9, 1.0, 1.1, 1.5, 3.0], [1.0, 1.0, 1.0, 9.0, 9.0]])
def test_lower_bound_is_that_of_the_enumerated_bootstrap(values: list[float]) -> None:
    # The medians are few distinct values, and none of these quantiles lies on a jump.
    assert lower_bound(values) == exact_lower_bound(values)


def test_lower_bound_is_repeatable_and_never_above_the_median() -> None:
    values = [1.2, 0.8, 2.2, 1.9, 1.1, 1.4, 0.7, 1.3, 1.6]
    assert lower_bound(values) == lower_bound(values) < float(np.median(values))
    assert lower_bound([1.5] * 9) == 1.5
    assert lower_bound([]) == 0.0


def test_spread_and_percentile() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    assert Spread.of([]) == Spread()
    assert percentile([0.0, 10.0], 99) == pytest.approx(9.9)
    assert percentile([], 50) == 0.0
