"""`paceline bench overlap` and `paceline bench load` as their user sees them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.protocol.errors import InvalidInput
from paceline_lab.bench.simulated import load
from paceline_lab.bench.simulated.local import Efficiency, Gain
from paceline_lab.bench.simulated.overlap import OverlapPlan, Results
from paceline_lab.bench.simulated.services import SimulatedPair

runner = CliRunner()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["overlap", "--only", "speed"], ("only", "speed")),
        (["overlap", "--verify-ms", "12"], ("verify_ms", "12")),
        (["overlap", "--acceptance", ".7"], ("acceptance", "0.7")),
        (["overlap", "--generations", "0"], ("generations", "0")),
        (["load", "--sessions", "0"], ("sessions", "0")),
        (["load", "--sessions", "many"], ("sessions", "many")),
        (["load", "--waves", "0"], ("waves", "0")),
    ],
)
def test_what_no_grid_has_is_refused_by_name(given: list[str], named: tuple[str, str], tmp_path: Path) -> None:
    result = runner.invoke(app, ["bench", *given, "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert all(part in result.stderr for part in named), result.stderr
    assert not list(tmp_path.iterdir())


def test_a_plan_counts_its_cells() -> None:
    assert len(OverlapPlan(("efficiency",))) == 4
    assert len(OverlapPlan(("gain",), verify_ms=(30.0,), acceptances=(0.8,))) == 2
    assert len(OverlapPlan(("efficiency", "gain"), verify_ms=(11.45,))) == 2 + 4
    with pytest.raises(InvalidInput, match="only"):
        OverlapPlan(())


def test_load_writes_a_report_with_every_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "PAIRS", {"fast": SimulatedPair("distribution=middling", 2.0, 0.5)})
    result = runner.invoke(
        app, ["bench", "load", "--sessions", "2", "--waves", "1", "--tokens", "4", "--out", str(tmp_path)]
    )
    assert result.exit_code == 0, result.output
    (report,) = tmp_path.glob("load-*.json")
    held = json.loads(report.read_text())
    assert {row["mode"] for row in held["rows"]} == {"on", "off", "auto"}
    assert all(row["tokens_per_second"] > 0 for row in held["rows"])
    assert held["facts"]["tokens"] == "4"


def test_sigterm_stops_the_services_too(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "from paceline.cli.main import main; main()",
        "bench",
        "load",
        "--sessions",
        "1",
        "--waves",
        "500",
    ]
    bench = psutil.Popen([*command, "--out", str(tmp_path)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(services := services_of(bench)) < 4:  # target, draft and two coordinators
        assert bench.poll() is None
        assert time.monotonic() < deadline, services
        time.sleep(0.05)
    bench.terminate()
    assert bench.wait(60) != 0
    _, alive = psutil.wait_procs(services, 10)
    assert not alive


def services_of(bench: psutil.Popen) -> list[psutil.Process]:
    return [child for child in bench.children() if "resource_tracker" not in " ".join(child.cmdline())]


def test_a_report_holds_plots_of_what_was_measured_only() -> None:
    efficiency = Efficiency(
        "distribution=close", 30.0, 2.5, 9, 100, 0.9, 0.8, 0.9, 0.88, 0.85, 100.0, 0.97, 0.7, 0.9, 1.0, 1.0, 0.1, 2.0
    )
    gain = Gain(0.8, 30.0, 7.5, 9, 0.9, 0.9, 1.9, 1.5, 1.8, 1.5, 1.4, 1.8)
    assert [plot.title for plot in Results(efficiencies=(efficiency,)).plots()] == ["Coordination efficiency"]
    (one, two) = Results(efficiencies=(efficiency,), gains=(gain,)).plots()
    assert one.bars[0].marks == [efficiency.ceiling]
    assert [value.median for value in two.bars[0].values if value] == [1.5]
