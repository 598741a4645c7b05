"""Every flag is made of its setting: name, default, bounds and help are written once."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.local.settings import ServeSettings
from paceline.protocol.errors import InvalidInput
from paceline.runtime.config import CoordinatorConfig, DraftConfig, TargetConfig
from paceline.runtime.fields import every_setting
from paceline.runtime.options import parse_config
from paceline.runtime.roles import PeerRole

ROOT = Path(__file__).parents[2]
CONFIGS = (TargetConfig, DraftConfig, CoordinatorConfig)
FLAGS_BEFORE = {
    TargetConfig: """model tensor-parallel-size max-queue dtype device threads max-model-len max-num-seqs kv-bytes
        gpu-memory-utilization prefill-chunk max-step-rows prefix-reuse reproducible reproducible-rows cuda-graphs
        trust-remote-code host port health-port port-file tls-certificate tls-key tls-client-ca tls-roles
        drain-seconds max-sessions-per-link share-prefixes""",
    DraftConfig: """drafter target-model dtype device threads max-model-len max-num-seqs kv-bytes
        gpu-memory-utilization prefill-chunk cuda-graphs trust-remote-code host port health-port port-file
        tls-certificate tls-key tls-client-ca drain-seconds""",
    CoordinatorConfig: """model served-model-name target draft drafter num-draft-tokens fan-out lease max-prefetched
        seed host port health-port port-file tls-certificate tls-key tls-client-ca peer-ca
        peer-certificate peer-key""",
    ServeSettings: """drafter tensor-parallel-size max-model-len max-num-seqs gpu-memory-utilization dtype
        reproducible trust-remote-code served-model-name seed host port draft-port target-port tls
        max-restarts""",
}
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


@pytest.mark.parametrize("kind", FLAGS_BEFORE)
def test_the_flags_that_users_know_are_there(kind: type[BaseModel]) -> None:
    assert set(FLAGS_BEFORE[kind].split()) <= {setting.flag.replace("_", "-") for setting in every_setting(kind)}


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_setting_has_one_flag_and_no_two_share_one(kind: type[TargetConfig]) -> None:
    settings = [setting for setting in every_setting(kind) if setting.flag]
    assert len({setting.flag for setting in settings}) == len(settings)
    expected = {"draft.address" if key == "draft" else key for key in leaves(kind())}
    assert {setting.key for setting in settings} == expected - WITHOUT_FLAG - set(kind.unused_keys)
    assert all(setting.help for setting in settings)


def test_a_setting_is_written_in_one_place() -> None:
    sources = [file for room in ("paceline", "target_service", "draft_service", "coordinator") for file in
               (ROOT / room).rglob("*.py")]  # fmt: skip
    definitions = [file for file in sources if re.search(r"gpu_memory_utilization\s*[:=]", file.read_text())]
    assert [file.name for file in definitions] == ["config.py"]


def test_help_shows_default_bounds_and_environment() -> None:
    text = runner.invoke(app, ["serve", "--help"]).stdout
    entry = text[text.index("--gpu-memory-utilization") :].partition(" --")[0]
    for part in ("Share of a GPU's memory to use. In (0, 1].", "[default: (0.9)]", "PACELINE_SERVE_GPU_MEMORY_UTILI"):
        assert part in entry
    assert "<auto|float32|bfloat16|float16>" in text
    assert "-tp" in text


def test_a_services_help_shows_defaults_and_bounds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    with pytest.raises(SystemExit) as ended:
        parse(monkeypatch, TargetConfig, "--help")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for part in ("In (0, 1].", "[default: (0.9)]", "In [1, 1024].", "In [8, 64], a multiple of 8.", "2^20", "(yes)"):
        assert part in shown


def test_flags_set_what_they_name_and_the_rest_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "target.toml"
    file.write_text("max_queue = 7\n[engine]\nthreads = 3\n")
    config = parse(monkeypatch, TargetConfig, "--config", str(file), "-tp", "2", "--no-prefix-reuse", "--host", "h")
    assert (config.tensor_parallel_size, config.engine.prefix_reuse, config.server.host) == (2, False, "h")
    assert (config.max_queue, config.engine.threads, config.engine.cuda_graphs) == (7, 3, True)
    draft = parse(monkeypatch, DraftConfig, "--drafter", "model:a", "--drafter", "model:b")
    assert (draft.drafters, draft.engine.dtype, draft.server.port) == (("model:a", "model:b"), "fast", 50052)


def test_peers_are_named_by_their_sections(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = parse(monkeypatch, CoordinatorConfig, "--target", "t:1", "--draft", "d:2", "--peer-ca", "ca.crt")
    target, draft = (
        config.reach(config.target, PeerRole.TARGET, "t:1"),
        config.reach(config.draft, PeerRole.DRAFT, "d:2"),
    )
    assert (target.tls_ca, draft.tls_ca) == (Path("ca.crt"), Path("ca.crt"))
    assert (config.target.address, config.draft.address) == (("t:1",), ("d:2",))
    several = parse(monkeypatch, CoordinatorConfig, "--target", "t:1", "--target", "dns:///t:2")
    assert several.target.address == ("t:1", "dns:///t:2")
    alone = parse(monkeypatch, CoordinatorConfig, "--peer-ca", "ca.crt")
    assert (alone.draft, alone.target.tls_ca) == (None, None)


@pytest.mark.parametrize("text", ['draft = "none"\n', 'drafter = "none"\n[draft]\naddress = "none"\n'])
def test_no_draft_service_is_none_in_a_file_as_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    file = tmp_path / "coordinator.toml"
    file.write_text(text)
    assert parse(monkeypatch, CoordinatorConfig, "--config", str(file)).draft is None
    assert parse(monkeypatch, CoordinatorConfig, "--config", str(file), "--draft", "d:2").draft.address == ("d:2",)
    file.write_text('[draft]\naddress = "d:1"\n')
    assert parse(monkeypatch, CoordinatorConfig, "--config", str(file), "--draft", "none").draft is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--gpu-memory-utilization", "2"), ("engine.gpu_memory_utilization", "2.0", "less than or equal to 1")),
        (("--dtype", "int3"), ("--dtype", "'int3'", "'bfloat16'")),
        (("--port", "many"), ("--port", "'many'", "integer")),
        (("--max-seqs", "3"), ("--max-seqs",)),
    ],
)
def test_a_bad_flag_names_field_value_and_limit(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], named: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse(monkeypatch, TargetConfig, *arguments)
    assert all(part in caught.value.message for part in named)


@pytest.mark.parametrize("wrong", [{"modle": "x"}, {"max_restarts": 1001}, {"seed": -1}, {"drafter": "oracle"}])
def test_settings_of_serve_are_refused_by_name(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(InvalidInput, match=name):
        ServeSettings(**wrong)
