"""Whether processes grow is told from samples of them."""

from __future__ import annotations

import os
from random import Random

from tests.chaos.resources import KINDS, Drift, ResourceWatch


def test_growth_is_told_from_noise_and_single_peaks() -> None:
    source = Random(3)
    seconds = [0.5 * place for place in range(120)]
    noise = [100 + source.gauss(0, 1) for _ in seconds]
    assert Drift.of(seconds, noise).low <= 0
    grows = [value + 2 * at_s / 60 for value, at_s in zip(noise, seconds, strict=True)]
    drift = Drift.of(seconds, grows)
    assert 0 < drift.low <= 2 <= drift.high
    peaked = [value + 400 * (place % 40 == 39) for place, value in enumerate(noise)]
    assert Drift.of(seconds, peaked).low <= 0
    assert Drift.of([1.0], [1.0]) == Drift(0.0, 0.0, 0.0)


def test_processes_are_sampled_and_one_that_is_gone_is_not() -> None:
    watch = ResourceWatch()
    watch.sample({"self": os.getpid(), "gone": 2**22 + 1})
    held = watch.samples["self"]
    assert [len(held.values[kind]) for kind in KINDS] == [1, 1, 1]
    assert all(held.values[kind][0] > 0 for kind in KINDS)
    assert watch.samples["gone"].at_s == []
