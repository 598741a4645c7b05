"""Every flag is made of its setting: name, default, bounds and help are written once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.runtime.config import CoordinatorConfig, DraftConfig, TargetConfig
from paceline.runtime.fields import every_setting
from paceline.runtime.options import parse_config
from paceline.runtime.roles import PeerRole

CONFIGS = (TargetConfig, DraftConfig, CoordinatorConfig)
WITHOUT_FLAG = {"target.tls_ca", "target.tls_certificate", "target.tls_key", "target.server_name"}
"""One CA for both peers is `--peer-ca`; what else their TLS needs is for a file."""

runner = CliRunner(env={"COLUMNS": "250", "TERM": "dumb"})


def parse(monkeypatch: pytest.MonkeyPatch, kind: Any, *arguments: str) -> Any:
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
    config = parse(monkeypatch, CoordinatorConfig, "--target", "t:1", "--draft", "d:2", "--peer-ca", "ca.crt")
    target = config.reach(config.target, PeerRole.TARGET, "t:1")
    draft = config.reach(config.draft, PeerRole.DRAFT, "d:2")
    assert (target.tls_ca, draft.tls_ca) == (Path("ca.crt"), Path("ca.crt"))
    assert (config.target.address, config.draft.address) == (("t:1",), ("d:2",))
    several = parse(monkeypatch, CoordinatorConfig, "--target", "t:1", "--target", "dns:///t:2")
    assert several.target.address == ("t:1", "dns:///t:2")
    alone = parse(monkeypatch, CoordinatorConfig, "--peer-ca", "ca.crt")
    assert (alone.draft, alone.target.tls_ca) == (None, None)


def test_no_draft_service_is_none_in_a_file_as_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "coordinator.toml"
    file.write_text('drafter = "none"\n[draft]\naddress = "none"\n')
    assert parse(monkeypatch, CoordinatorConfig, "--config", str(file)).draft is None
    assert parse(monkeypatch, CoordinatorConfig, "--config", str(file), "--draft", "d:2").draft.address == ("d:2",)
    file.write_text('[draft]\naddress = "d:1"\n')
    assert parse(monkeypatch, CoordinatorConfig, "--config", str(file), "--draft", "none").draft is None
