"""Reports: their arithmetic against cases known by other means, their progress, and what is read back from one."""

from __future__ import annotations

import itertools
import time
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from paceline.protocol.errors import InvalidInput
from paceline_lab.reporting.figures import Spread, lower_bound, percentile
from paceline_lab.reporting.presentation import markdown_table
from paceline_lab.reporting.progress import LOG_SECONDS, progress_bar
from paceline_lab.reporting.reports import earlier_turns, write_report

ASKED = {"model": "m", "settings": "a, b"}


def exact_lower_bound(values: list[float]) -> float:
    """The 5 % quantile of the bootstrap distribution of the median, by enumerating all n^n samples."""
    medians = [float(np.median(sample)) for sample in itertools.product(values, repeat=len(values))]
    return float(np.percentile(medians, 5))


@pytest.mark.parametrize("values", [[1.0, 2.0, 4.0], [0.9, 1.0, 1.1, 1.5, 3.0], [1.0, 1.0, 1.0, 9.0, 9.0]])
def test_lower_bound_is_that_of_the_enumerated_bootstrap(values: list[float]) -> None:
    # The medians are few distinct values, and none of these quantiles lies on a jump.
    assert lower_bound(values) == exact_lower_bound(values)


def test_spread_and_percentile() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    assert Spread.of([]) == Spread()
    assert lower_bound([]) == 0.0
    assert percentile([0.0, 10.0], 99) == pytest.approx(9.9)
    assert percentile([], 50) == 0.0


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


def test_a_report_is_added_to_by_who_asks_for_the_same(tmp_path: Path) -> None:
    assert earlier_turns(tmp_path, "edits", ASKED) == []
    write_report(tmp_path, "edits", ASKED | {"load average": "0.1"}, {"turns": [{"task": "one"}]}, "# Edits\n")
    assert earlier_turns(tmp_path, "edits", ASKED) == [{"task": "one"}]
    for fact, found in (("settings", "'a, b'"), ("drafters", "None")):
        with pytest.raises(InvalidInput, match=rf"{fact} in .*edits-.*json = {found}: must be 'c', as now"):
            earlier_turns(tmp_path, "edits", ASKED | {fact: "c"})


def test_tables_have_a_line_for_each_row() -> None:
    assert markdown_table([{"a": 1, "b": 0.25}]) == "| a | b |\n| --- | --- |\n| 1 | 0.250 |\n"
    assert markdown_table([]) == "not run\n"
