"""`paceline config`: what it shows can be read back, what it calls valid starts, and its page is whole."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli.config import PROGRAMS
from paceline.cli.main import app
from paceline.runtime.config import DraftConfig
from paceline.runtime.fields import every_setting
from paceline.runtime.options import gather, parse
from tools.configuration import page

runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})
GIVEN = {
    "target-service": ["--model", 'a "quoted" \\ näme\x7f', "-tp", "2", "--no-prefix-reuse", "--tls-key", "/k"],
    "draft-service": ["--drafter", "model:a", "--drafter", "model:b,c", "--host", "h"],
    "coordinator": ["--target", "t:1", "--draft", "d:2", "--seed", str((1 << 64) - 1), "--draft-timeout-ms", "1e-5"],
    "gateway": ["--coordinator", "a:1", "--coordinator", "b:2", "--max-body-bytes", "2048", "--host", "h"],
    "serve": ["--model", "m", "--drafter", "none", "--drain-seconds", "7"],
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_shown_reads_back_as_the_same_settings(tmp_path: Path, program: Any) -> None:
    shown = runner.invoke(app, ["config", "show", program, *GIVEN[program]])
    assert shown.exit_code == 0, shown.stderr
    file = tmp_path / "shown.toml"
    file.write_text(shown.stdout)
    again = runner.invoke(app, ["config", "show", program, "--config", str(file)])
    assert tomllib.loads(again.stdout) == tomllib.loads(shown.stdout)
    assert "# default" not in again.stdout
    given = parse(PROGRAMS[program], "", GIVEN[program], {}).config
    assert gather(PROGRAMS[program], file, {}, {}).config.model_dump() == given.model_dump()


def test_each_setting_is_shown_with_what_gave_it(tmp_path: Path) -> None:
    file = tmp_path / "coordinator.toml"
    file.write_text('lease = 3\ndraft = "none"\n')
    given = {"PACELINE_COORDINATOR_FAN_OUT": "2"}
    arguments = ["config", "show", "coordinator", "--config", str(file), "--max-prefetched", "1"]
    lines = runner.invoke(app, arguments, env=given).stdout.splitlines()
    assert f"lease = 3  # {file}" in lines
    assert "fan_out = 2  # PACELINE_COORDINATOR_FAN_OUT" in lines
    assert "max_prefetched = 1  # --max-prefetched" in lines
    assert 'drafter = "auto"  # default' in lines
    assert lines[lines.index("# [draft]") + 1] == "# address is unset"


@pytest.mark.parametrize(
    ("program", "text", "named"),
    [
        ("target-service", "max_qeue = 1", "max_qeue = 1: must be valid (Extra inputs are not permitted)"),
        ("draft-service", 'drafters = ["oracle"]', "drafters = 'oracle': must be model:NAME"),
        ("serve", 'drafter = "oracle"', "drafter = 'oracle': must be"),
        ("coordinator", "model = ", "config = "),
    ],
)
def test_check_names_what_is_wrong_with_a_file(tmp_path: Path, program: str, text: str, named: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(f"{text}\n")
    result = runner.invoke(app, ["config", "check", program, "--config", str(file)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"paceline: error: {named}")
    assert result.stderr.count("\n") == 1
    assert str(file) in result.stderr or program == "draft-service"
    file.write_text("")
    result = runner.invoke(app, ["config", "check", program, "--config", str(file)])
    assert (result.exit_code, result.stdout) == (0, f"valid: {program}, 0 settings given\n")


def test_the_schema_describes_every_key_and_refuses_others() -> None:
    schema = json.loads(runner.invoke(app, ["config", "schema", "draft-service"]).stdout)
    engine = schema["$defs"]["EngineSettings"]
    assert schema["additionalProperties"] is engine["additionalProperties"] is False
    assert engine["properties"]["threads"]["maximum"] == 1024
    assert "threads; 0: every core" in engine["properties"]["threads"]["description"]
    assert set(schema["properties"]) == set(DraftConfig.model_fields)


def test_the_reference_names_every_setting() -> None:
    rows = [line.split(" | ") for line in page().splitlines() if line.startswith("| `")]
    variables = {row[2].strip("`") for row in rows}
    assert variables == {setting.variable for kind in PROGRAMS.values() for setting in every_setting(kind)}
