"""Settings become files and files settings: what `paceline config` shows, checks and documents, and every flag."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from paceline.cli.config import PROGRAMS
from paceline.cli.main import app
from paceline.local.service_process import write_config
from paceline.local.settings import ServeSettings, coordinator_flags, draft_flags, gpu_shares, target_flags
from paceline.runtime.config import CoordinatorConfig, DraftConfig, TargetConfig, load_config
from paceline.runtime.fields import every_setting
from paceline.runtime.options import gather, parse, parse_config
from paceline.runtime.roles import PeerRole
from tools.configuration import page

runner = CliRunner(env={"COLUMNS": "250", "TERM": "dumb"})
CONFIGS = (TargetConfig, DraftConfig, CoordinatorConfig)
WITHOUT_FLAG = {"target.tls_ca", "target.tls_certificate", "target.tls_key", "target.server_name"}
"""One CA for both peers is `--peer-ca`; what else their TLS needs is for a file."""
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


def parsed(monkeypatch: pytest.MonkeyPatch, kind: Any, *arguments: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["service", *arguments])
    return parse_config(kind, "A service.")


def leaves(settings: BaseModel, prefix: str = "") -> set[str]:
    nested = {name: getattr(settings, name) for name in type(settings).model_fields}
    own = {prefix + name for name, value in nested.items() if not isinstance(value, BaseModel)}
    return own.union(
        *(leaves(each, f"{prefix}{name}.") for name, each in nested.items() if isinstance(each, BaseModel))
    )


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_setting_has_one_flag_and_no_two_share_one(kind: type[TargetConfig]) -> None:
    settings = [setting for setting in every_setting(kind) if setting.flag]
    assert len({setting.flag for setting in settings}) == len(settings)
    expected = {"draft.address" if key == "draft" else key for key in leaves(kind())}
    assert {setting.key for setting in settings} == expected - WITHOUT_FLAG - set(kind.unused_keys)
    assert all(setting.help for setting in settings)


def test_help_shows_default_bounds_and_environment() -> None:
    text = runner.invoke(app, ["serve", "--help"]).stdout
    entry = text[text.index("--gpu-memory-utilization") :].partition(" --")[0]
    for part in ("Share of a GPU's memory to use. In (0, 1].", "[default: (0.9)]", "PACELINE_SERVE_GPU_MEMORY_UTILI"):
        assert part in entry
    assert "<auto|float32|bfloat16|float16>" in text
    assert "-tp" in text


def test_peers_are_named_by_their_sections(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = parsed(monkeypatch, CoordinatorConfig, "--target", "t:1", "--draft", "d:2", "--peer-ca", "ca.crt")
    target = config.reach(config.target, PeerRole.TARGET, "t:1")
    draft = config.reach(config.draft, PeerRole.DRAFT, "d:2")
    assert (target.tls_ca, draft.tls_ca) == (Path("ca.crt"), Path("ca.crt"))
    assert (config.target.address, config.draft.address) == (("t:1",), ("d:2",))
    several = parsed(monkeypatch, CoordinatorConfig, "--target", "t:1", "--target", "dns:///t:2")
    assert several.target.address == ("t:1", "dns:///t:2")
    alone = parsed(monkeypatch, CoordinatorConfig, "--peer-ca", "ca.crt")
    assert (alone.draft, alone.target.tls_ca) == (None, None)


def test_no_draft_service_is_none_in_a_file_as_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "coordinator.toml"
    file.write_text('drafter = "none"\n[draft]\naddress = "none"\n')
    assert parsed(monkeypatch, CoordinatorConfig, "--config", str(file)).draft is None
    assert parsed(monkeypatch, CoordinatorConfig, "--config", str(file), "--draft", "d:2").draft.address == ("d:2",)
    file.write_text('[draft]\naddress = "d:1"\n')
    assert parsed(monkeypatch, CoordinatorConfig, "--config", str(file), "--draft", "none").draft is None


@pytest.mark.parametrize(("drafter", "shares"), [("model:x", [0.72, 0.18]), ("ngram", [0.9, 0.0])])
def test_target_and_draft_of_one_machine_divide_its_gpu(drafter: str, shares: list[float]) -> None:
    flags = gpu_shares(ServeSettings(model="m", drafter=drafter))
    assert [each["engine.gpu_memory_utilization"] for each in flags] == shares


def test_written_configs_read_back_as_the_settings(tmp_path: Path) -> None:
    settings = ServeSettings(
        model='a "quoted" \\ name é',
        drafter="model:x",
        num_draft_tokens=6,
        max_model_len=128,
        dtype="float32",
        quantization="int8",
        seed=9,
    )
    write_config(TargetConfig, tmp_path / "t", target_flags(settings, 3))
    write_config(DraftConfig, tmp_path / "d", draft_flags(settings, 1))
    write_config(CoordinatorConfig, tmp_path / "c", coordinator_flags(settings, "h:1", "h:2"))
    read = load_config(TargetConfig, tmp_path / "t", {})
    assert (read.model, read.engine.threads, read.engine.max_model_len) == (settings.model, 3, 128)
    drafting = load_config(DraftConfig, tmp_path / "d", {})
    assert drafting.drafters == ("model:x",)
    assert (read.engine.quantization, drafting.engine.quantization) == ("int8", "none")
    served = load_config(CoordinatorConfig, tmp_path / "c", {})
    assert (served.seed, served.num_draft_tokens, served.target.address) == (9, 6, ("h:1",))
    assert served.draft is not None
    assert served.draft.address == ("h:2",)
