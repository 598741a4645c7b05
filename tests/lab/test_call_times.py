"""How long one call takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paceline_lab.bench import call_times


def test_a_run_s_time_is_shared_by_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    now, steps = 0.0, iter([1e-6, 3e-6, 2e-6, 2e-6, 5e-6, 5e-6])
    monkeypatch.setattr(call_times, "time", SimpleNamespace(perf_counter=lambda: now))

    def call() -> None:
        nonlocal now
        now += next(steps)

    assert call_times.run_times_us(call, runs=3, calls=2) == pytest.approx([2.0, 2.0, 5.0])
