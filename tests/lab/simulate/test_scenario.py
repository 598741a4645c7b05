"""What a scenario file may say, and how it is refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.protocol.errors import InvalidInput
from paceline_lab.simulate.scenario import Scenario

ROOT = Path(__file__).parents[3]
runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb", "PACELINE_HOME": ""})

SMALL = """
seconds = 2
warmup_seconds = 0.5
[[targets]]
step = [[1, 10.0], [65, 20.0]]
price_per_hour = 36.0
[[drafts]]
step = [[1, 1.0]]
[speculation]
k = "4+ahead"
[[traffic]]
sessions = 4
answer_tokens = {median = 40, p99 = 80}
"""


def read(tmp_path: Path, text: str) -> Scenario:
    file = tmp_path / "small.toml"
    file.write_text(text)
    return Scenario.read(file)


def test_the_example_of_the_documents_is_a_scenario(tmp_path: Path) -> None:
    (text,) = re.findall(
        r"^```toml\n(.*?)^```", (ROOT / "docs" / "capacity.md").read_text(), re.MULTILINE | re.DOTALL
    )
    found = read(tmp_path, text)
    assert (found.gpus, found.cells, len(found.failures)) == (12 * (2 * 4 + 2), 12, 1)


def test_a_named_gpu_brings_steps_and_kv_rows(tmp_path: Path) -> None:
    text = SMALL.replace("step = [[1, 10.0], [65, 20.0]]", 'gpu = "h100"\nmodel = "qwen3-32b"\ntensor_parallel = 4')
    (target,) = read(tmp_path, text).targets
    assert target.spec.alone.ms(1) == pytest.approx(target.place.step_ms(1))
    assert target.spec.kv_rows == target.place.kv_tokens > 100_000
    # 8 heads of 128 keys and values in 64 layers, 2 bytes each, over 4 GPUs at 80 % of 3350 GB/s.
    assert target.spec.context_ms == pytest.approx(1e3 * 2 * 64 * 8 * 128 * 2 / (4 * 0.8 * 3350e6), rel=0.01)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        pytest.param("seconds = 2", "second = 2", "second = 2: must be valid", id="key"),
        pytest.param("warmup_seconds = 0.5", "warmup_seconds = 3", "warmup_seconds = 3.0: must be", id="warm-up"),
        pytest.param("sessions = 4", "sessions = 4\nrequests_per_second = 1", "requests_per_second = 1.0", id="two"),
        pytest.param("step = [[1, 1.0]]", 'gpu = "h900"\nmodel = "qwen3-0.6b"', "gpu = 'h900'", id="gpu"),
        pytest.param("step = [[1, 1.0]]", 'gpu = "t4"\nmodel = "qwen3-32b"', "weights GB", id="too large"),
        pytest.param("price_per_hour = 36.0", "kv_rows = 100", "targets.kv_rows = 100: must be at least 7", id="kv"),
        pytest.param("[[drafts]]\nstep = [[1, 1.0]]", "", "speculation.k = '4+ahead': must be 0", id="drafts"),
        pytest.param("p99 = 80", "p99 = 8", "p99 = 8: must be 0, or at least median = 40", id="lengths"),
        pytest.param("sessions = 4", 'sessions = 4\npair = "great"', "pair = 'great': must be one of", id="pair"),
        pytest.param("seconds = 2", "seconds = 2\nsimulated_cells = 2", "simulated_cells = 2: must", id="cells"),
    ],
)  # fmt: skip
def test_what_a_scenario_can_not_say_is_refused_by_name(tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        read(tmp_path, SMALL.replace(old, new, 1))
    assert said in refused.value.message


@pytest.mark.parametrize(
    ("text", "said"),
    [("0\nx\n", "arrivals line 2 = 'x'"), ("2\n1\n", "arrivals line 2 = 1.0: must be at least 2"), ("", "arrivals")],
)
def test_bad_arrivals_are_refused_by_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "arrivals.txt"
    file.write_text(text)
    scenario = tmp_path / "small.toml"
    scenario.write_text(SMALL.replace("sessions = 4", f'arrivals = "{file}"'))
    ran = runner.invoke(app, ["simulate", "--scenario", str(scenario)])
    assert ran.exit_code == 2
    assert said in ran.output


def test_the_command_writes_a_report_with_plots(tmp_path: Path) -> None:
    scenario = tmp_path / "small.toml"
    scenario.write_text(SMALL.replace("seconds = 2", "seconds = 1").replace("sessions = 4", "sessions = 2"))
    ran = runner.invoke(app, ["simulate", "--scenario", str(scenario), "--out", str(tmp_path / "out")])
    assert ran.exit_code == 0, ran.output
    assert "Bottleneck: " in ran.output
    (report,) = (tmp_path / "out").glob("simulated-small-*.json")
    found = json.loads(report.read_text())["outcome"]
    # 36 an hour is a cent a second.
    assert found["cost_per_million"] == pytest.approx(1e6 * 0.01 / found["tokens_per_second"])
    assert len([*(tmp_path / "out").glob("*.svg")]) == 2


@pytest.mark.parametrize("options", [[], ["--study", "drafts", "--scenario", "x.toml"]])
def test_one_thing_is_simulated_at_a_time(options: list[str]) -> None:
    ran = runner.invoke(app, ["simulate", *options])
    assert ran.exit_code == 2
    assert "must be exactly one of them" in ran.output


@pytest.mark.parametrize(
    ("what", "option", "value"),
    [
        ("--scenario", "--sessions", "64"),
        ("--study", "--k", "0"),
        ("--scenario", "--fan-out", "2"),
        ("--study", "--target-line", "1:500"),
        ("--scenario", "--target-one-way-ms", "0"),
    ],
)
def test_what_a_trace_alone_takes_is_refused_by_name(tmp_path: Path, what: str, option: str, value: str) -> None:
    file = tmp_path / "small.toml"
    file.write_text(SMALL)
    ran = runner.invoke(app, ["simulate", what, str(file) if what == "--scenario" else "zones", option, value])
    assert ran.exit_code == 2
    assert f"{option[2:].replace('-', '_')} = " in ran.output
    assert f"must be left out with {what}" in ran.output
