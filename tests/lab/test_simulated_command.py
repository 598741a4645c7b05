"""`paceline bench overlap` as its user sees it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.protocol.errors import InvalidInput
from paceline_lab.bench.simulated.local import Efficiency
from paceline_lab.bench.simulated.overlap import OverlapPlan, Results

runner = CliRunner()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["overlap", "--only", "speed"], ("only", "speed")),
        (["overlap", "--verify-ms", "12"], ("verify_ms", "12")),
        (["overlap", "--acceptance", ".7"], ("acceptance", "0.7")),
        (["overlap", "--generations", "0"], ("generations", "0")),
        (["ab", "load", "--users", "0"], ("users", "0")),
        (["ab", "load", "--users", "many"], ("users", "many")),
        (["ab", "load", "--turns", "0"], ("turns", "0")),
        (["ab", "load", "--tokens", "1"], ("tokens", "1", "at least 2")),
        (["ab", "load", "--arms", "off"], ("arms", "off", "target-only, k = 4, auto")),
        (["ab", "load", "--against", "gone"], ("against", "gone", "folder")),
        (["ab", "loads"], ("experiment", "loads", "http, tracing, load")),
    ],
)
def test_what_no_grid_has_is_refused_by_name(given: list[str], named: tuple[str, str], tmp_path: Path) -> None:
    result = runner.invoke(app, ["bench", *given, "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert all(part in result.stderr for part in named), result.stderr
    assert not list(tmp_path.iterdir())


def test_a_plan_counts_its_cells() -> None:
    assert len(OverlapPlan(("efficiency",))) == 4
    assert len(OverlapPlan(("delay",), verify_ms=(30.0,), acceptances=(0.8,))) == 4 * 2
    assert len(OverlapPlan(("efficiency", "delay"), verify_ms=(11.45,), acceptances=(0.8,))) == 2 + 4 * 2
    with pytest.raises(InvalidInput, match="only"):
        OverlapPlan(())


def test_a_report_holds_plots_of_what_was_measured_only() -> None:
    efficiency = Efficiency(
        "distribution=close", 30.0, 2.5, 9, 100, 0.9, 0.8, 0.9, 0.88, 0.85, 100.0, 0.97, 0.7, 0.9, 1.0, 1.0, 0.1, 2.0
    )
    assert not Results().plots()
    (plot,) = Results(efficiencies=(efficiency,)).plots()
    assert plot.title == "Coordination efficiency"
    assert plot.bars[0].marks == [efficiency.ceiling]
    assert [value.median for value in plot.bars[0].values if value] == [0.9]
