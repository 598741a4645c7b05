"""Progress where no terminal shows it."""

from __future__ import annotations

import time
from io import StringIO

import pytest
from rich.console import Console

from paceline_lab.reporting.progress import LOG_SECONDS, progress_bar


@pytest.mark.parametrize(("step_s", "shown"), [(0.0, ["6 of 6"]), (LOG_SECONDS / 2, ["2 of 6", "4 of 6", "6 of 6"])])
def test_a_log_has_a_line_a_minute_and_one_at_the_end(
    monkeypatch: pytest.MonkeyPatch, step_s: float, shown: list[str]
) -> None:
    log, now_s = StringIO(), 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    with progress_bar(Console(file=log, soft_wrap=True), "runs", 6) as advance:
        for step in range(6):
            now_s += step_s
            advance(f"step {step}")
    lines = log.getvalue().splitlines()
    assert [line.split(", ")[0] for line in lines] == [f"runs: {each}" for each in shown]
    assert lines[-1] == f"runs: 6 of 6, step 5, after {6 * step_s:.0f} s"
