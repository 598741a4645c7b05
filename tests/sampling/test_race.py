"""The race: the compiled one with its prefilter against the definition, and its distribution."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from paceline.protocol.errors import InvalidInput
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.sampling import noise, racing
from paceline.sampling.distribution import divided_scores, processed_scores
from paceline.sampling.noise import Stream
from paceline.sampling.racing import SHORT_ROW, race, race_best, race_rows
from tests.sampling import plain
from tests.sampling.field import exponentials

INF = float("inf")


@cache
def rows() -> list[NDArray[np.float32] | NDArray[np.float64]]:
    """360 rows: flat to peaked, quantised to force ties, masked, extreme, short and long. Not to be written to."""
    rng = np.random.default_rng(1)
    made: list[NDArray[np.float32] | NDArray[np.float64]] = []
    for n in range(360):
        size = int(rng.choice([1, 3, 64, 257, 2000]))
        row = rng.standard_normal(size) * rng.choice([0, 0.1, 3, 40, 1e6])
        row = np.round(row, int(rng.choice([0, 6])))
        match n % 6:
            case 1:
                row[rng.random(size) < rng.choice([0.3, 0.9, 0.99])] = -INF
            case 2:
                row[rng.random(size) < 0.3] = np.finfo(np.float32).min
            case 3:
                row[rng.random(size) < 0.1] = np.finfo(np.float32).max
            case 4:
                row += rng.choice([-1e7, 1e5, 1e30])
        row[rng.integers(size)] = rng.choice([-5.0, 5.0])
        made.append(row if n % 4 == 0 else row.astype(np.float32))
    return made


@pytest.mark.parametrize("size", [24, 257, SHORT_ROW, SHORT_ROW + 1])
def test_rows_raced_together_draw_what_each_draws_alone(size: int) -> None:
    rng = np.random.default_rng(size)
    scores = np.round(rng.standard_normal((5, size)) * 3, 1).astype(np.float32)  # with ties
    scores[1, rng.random(size) < 0.97] = -INF
    scores[1, 7] = 0
    positions, key = (9, 2, 9, 4_000_000_000, 9), NoiseKey(6, 3)
    for m in (1, 4, size):
        alone = [race_best(row, m, key, Stream.DRAFT, at, 5) for row, at in zip(scores, positions, strict=True)]
        together = race_rows(scores, m, key, Stream.DRAFT, positions, 5)
        assert [tuple(i for i in row if i >= 0) for row in together.tolist()] == alone
        assert together.shape == (5, m)


@pytest.mark.parametrize("size", [24, SHORT_ROW + 1])
def test_rows_raced_together_are_refused_as_one_is(size: int) -> None:
    scores = np.zeros((2, size), np.float32)
    scores[1] = -INF
    with pytest.raises(InvalidInput, match="largest score"):
        race_rows(scores, 1, NoiseKey(0), Stream.DRAFT, (0, 1))
    with pytest.raises(InvalidInput, match="position"):
        race_rows(scores[:1], 1, NoiseKey(0), Stream.DRAFT, (1 << 32,))
    scores[1] = 0
    scores[1, size // 2] = np.nan
    with pytest.raises(InvalidInput, match="largest score = nan"):
        race_rows(scores, 1, NoiseKey(0), Stream.DRAFT, (0, 1))
    assert race_rows(scores[:0], 1, NoiseKey(0), Stream.DRAFT, ()).shape == (0, 1)


@pytest.mark.parametrize("size", [24, SHORT_ROW + 1])
def test_a_divisor_races_what_was_divided_before(size: int) -> None:
    logits = (np.random.default_rng(size).standard_normal((40, size)) * 7).astype(np.float32)
    positions = tuple(range(40))
    for temperature in (0.3, 0.8, 1.7):
        params = SamplingParams(temperature=temperature)
        scores, divisor = divided_scores(logits, params)
        assert scores is logits
        divided = race_rows(scores, 4, NoiseKey(1), Stream.DRAFT, positions, divisor=divisor)
        before = race_rows(processed_scores(logits, params), 4, NoiseKey(1), Stream.DRAFT, positions)
        assert divided.tolist() == before.tolist()


@pytest.mark.parametrize("size", [4 * noise.LANES - 1, 4 * noise.LANES + 1, 9 * noise.LANES + 3])
def test_a_long_row_has_the_noise_of_each_of_its_ids(size: int) -> None:
    key, position = NoiseKey(11, 2), 4_000_000_001
    surprisals = -np.log(exponentials(key, Stream.DRAFT, position, size, 3).astype(np.float64))
    ceilings = racing._ceilings.row(noise.address_of(key, Stream.DRAFT, position, 3), 0, size)
    assert ((surprisals <= ceilings + 1e-3) & (ceilings <= np.maximum(surprisals, -2) + 3)).all()
    scores = np.zeros(size, np.float32)
    best = np.argsort(-surprisals, kind="stable")[:6]
    assert race_best(scores, 6, key, Stream.DRAFT, position, 3) == tuple(best.tolist())


def test_race_equals_the_definition_row_by_row() -> None:
    for n, row in enumerate(rows()):
        key = NoiseKey(n * 0x9E3779B97F4A7C15 % 2**64, n % 3)
        drawn = exponentials(key, Stream.DRAFT, n, row.size, n % 5)
        order = plain.ranking(row, drawn)
        assert race(row, key, Stream.DRAFT, n, n % 5) == order[0], n
        for m in (2, 5, row.size + 1):
            assert race_best(row, m, key, Stream.DRAFT, n, n % 5) == tuple(order[:m]), (n, m)


def logarithms_a_race(monkeypatch: pytest.MonkeyPatch) -> float:
    """How many noise values a race of 20,000 ids looks at, on average."""
    looked_at = []

    def counting(*counter_and_key: np.uint32) -> tuple[np.uint32, ...]:
        looked_at.append(counter_and_key)
        return noise.philox_block(*counter_and_key)

    monkeypatch.setattr(racing, "philox_block", counting)
    interpreted: Any = racing._best_of_race
    monkeypatch.setattr(racing, "_best_of_race", interpreted.py_func)
    row = (np.random.default_rng(0).standard_normal(20_000) * 3).astype(np.float32)
    for position in range(20):
        race(row, NoiseKey(2), Stream.DRAFT, position)
    return len(looked_at) / 20


def test_prefilter_takes_few_logarithms(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= logarithms_a_race(monkeypatch) < 30


def test_mutant_loose_ceilings_take_many_logarithms(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = racing._CeilingCache.row
    monkeypatch.setattr(racing._CeilingCache, "row", lambda *given: exact(*given) + np.float32(5))
    assert logarithms_a_race(monkeypatch) > 100


@pytest.mark.parametrize("size", [4, 4000])
@pytest.mark.parametrize("bad", [float("nan"), INF, None])
def test_rows_that_cannot_be_drawn_from(size: int, bad: float | None) -> None:
    row = np.full(size, -INF if bad is None else 0, np.float32)
    if bad is not None:
        row[1] = bad
    with pytest.raises(InvalidInput, match="largest score"):
        race(row, NoiseKey(0), Stream.DRAFT, 0)
    with pytest.raises(InvalidInput, match="largest score"):
        race_best(row, 2, NoiseKey(0), Stream.DRAFT, 0)


def test_m_has_a_limit() -> None:
    with pytest.raises(InvalidInput, match="m = 0"):
        race_best(np.zeros(4, np.float32), 0, NoiseKey(0), Stream.DRAFT, 0)


@pytest.mark.parametrize(("size", "alive"), [pytest.param(40, 40, marks=pytest.mark.full), (40, 30), (4096, 12)])
def test_race_draws_the_softmax(size: int, alive: int) -> None:
    # Fixed seeds; a correct sampler fails one such test in 10^6.
    rng = np.random.default_rng(alive)
    row = np.full(size, -INF, np.float32)
    ids = rng.choice(size, alive, replace=False)
    row[ids] = rng.standard_normal(alive) * 1.5
    p = np.exp(row.astype(np.float64))[ids]
    p /= p.sum()
    draws = 15_000
    counts = np.bincount([race(row, NoiseKey(9), Stream.DRAFT, at) for at in range(draws)], minlength=size)
    assert counts.sum() == counts[ids].sum()
    large = p * draws >= 5
    observed = np.append(counts[ids][large], counts[ids][~large].sum())
    expected = np.append(p[large], p[~large].sum()) * draws
    keep = expected > 0
    assert stats.chisquare(observed[keep], expected[keep]).pvalue > 1e-6
