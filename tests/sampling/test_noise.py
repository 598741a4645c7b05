"""The integers and their exponentials: pinned, reproducible, never shared between draws."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from paceline.protocol.errors import InvalidInput
from paceline.protocol.sampling import NoiseKey
from paceline.sampling import noise, racing
from paceline.sampling.noise import Stream, random_words, uniform
from tests.sampling import plain
from tests.sampling.field import exponentials, exponentials_of

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vectors" / "noise.json").read_text())
EDGE_WORDS = [0, 1, 2, 3, 255, 2**24 - 1, 2**24, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 257, 2**32 - 2, 2**32 - 1]


@pytest.mark.parametrize("case", VECTORS["random123"])
def test_random123_known_answers(case: dict[str, list[str]]) -> None:
    counter, key, answer = ([int(word, 16) for word in case[name]] for name in ("counter", "key", "answer"))
    assert plain.philox(counter, key) == tuple(answer)
    assert [int(word) for word in noise.philox_block(*(np.uint32(word) for word in (*counter, *key)))] == answer


@pytest.mark.parametrize("case", VECTORS["draws"])
def test_stored_vectors(case: dict[str, Any]) -> None:
    key, stream = NoiseKey(int(case["seed"], 16), case["sample_index"]), Stream(case["stream"])
    position, round_key, ids = case["position"], case["round_key"], case["ids"]
    stored = [int(word, 16) for word in case["words"]]
    assert plain.words(key, stream, position, ids, round_key) == stored
    size = max(ids) + 1
    assert random_words(key, stream, position, size, round_key)[ids].tolist() == stored
    drawn = exponentials(key, stream, position, size, round_key)[ids]
    assert drawn.tolist() == [float.fromhex(value) for value in case["exponentials"]]
    assert uniform(key, stream, position, round_key) == float.fromhex(case["uniform"])
    assert racing.race(np.zeros(size, np.float32), key, stream, position, round_key) == case["winner_of_equals"]


def test_u_at_its_ends_gives_finite_positive_exponentials() -> None:
    edges = exponentials_of(np.array(EDGE_WORDS, np.uint32))
    assert edges.tolist() == [plain.exponential(word) for word in EDGE_WORDS]
    assert edges.min() == np.float32(2.0**-33)
    assert edges.max() == np.float32(33 * math.log(2))


def test_ceilings_bound_minus_log_e() -> None:
    random = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    small = (random[:1000] >> np.arange(1000, dtype=np.uint32) % 31).astype(np.uint32)
    words = np.concatenate([np.array(EDGE_WORDS, np.uint32), small, random])
    exact = -np.log(exponentials_of(words).astype(np.float64))
    ceilings = np.empty(words.size, np.float32)
    racing._ceilings_of_words(words, ceilings)
    assert (ceilings - exact).min() > -1e-4  # the slack of the prefilter is 1e-3
    assert np.isfinite(ceilings).all()
    u = (words + 0.5) / 2**32
    assert (ceilings + np.log(u))[
        words > 255
    ].max() < 0.07  # 0.086 ln 2 and x's last bit: tight, so that it saves work


def test_uniform_stays_inside_and_is_uniform() -> None:
    key = NoiseKey(3)
    draws = [uniform(key, Stream.ACCEPT, position, 4) for position in range(20_000)]
    assert min(draws) > 0 and max(draws) < 1
    assert stats.kstest(draws, "uniform").pvalue > 1e-6


@pytest.mark.parametrize("high_low", [(0, 0), (0xFFFFFFFF, 0xFFFFFFFF)])
def test_uniform_of_extreme_words_is_strictly_inside(
    high_low: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise, "_first_words", lambda *_: high_low)
    assert 0 < uniform(NoiseKey(0), Stream.ACCEPT, 0) < 1


@pytest.mark.parametrize(("position", "round_key"), [(-1, 0), (1 << 32, 0), (0, -1), (0, 1 << 32)])
def test_address_limits_are_named(position: int, round_key: int) -> None:
    with pytest.raises(InvalidInput, match=r"must be in \[0, 2\^32\)"):
        uniform(NoiseKey(0), Stream.DRAFT, position, round_key)


def test_cache_is_bounded_and_thread_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = racing._CeilingCache()
    monkeypatch.setattr(racing, "CACHE_BYTES", 5 * 4 * 1000)
    monkeypatch.setattr(racing, "_ceilings", cache)
    scores = np.zeros(1000, np.float32)

    def draw(position: int) -> int:
        return racing.race(scores, NoiseKey(1), Stream.DRAFT, position % 17)

    with ThreadPoolExecutor(4) as pool:
        drawn = list(pool.map(draw, range(400)))
    assert drawn == ([draw(position) for position in range(17)] * 24)[:400]
    assert len(cache._rows) == 5
    assert cache._bytes == sum(row.nbytes for row in cache._rows.values()) == 5 * 4 * 1000
