"""A setting given by file, environment or flag: the same names, one order, and the source in every error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from paceline.cli.config import PROGRAMS
from paceline.protocol.errors import InvalidInput
from paceline.runtime.config import CoordinatorConfig, DraftConfig, TargetConfig
from paceline.runtime.fields import Setting, every_setting
from paceline.runtime.options import gather, parse
from paceline.runtime.sources import value_of

SERVICE_LINKS = {
    "PACELINE_TARGET_PORT": "tcp://10.0.0.7:50053",
    "PACELINE_TARGET_PORT_50053_TCP": "tcp://10.0.0.7:50053",
    "PACELINE_TARGET_PORT_50053_TCP_ADDR": "10.0.0.7",
    "PACELINE_TARGET_PORT_50053_TCP_PORT": "50053",
    "PACELINE_TARGET_PORT_50053_TCP_PROTO": "tcp",
    "PACELINE_TARGET_SERVICE_HOST": "10.0.0.7",
    "PACELINE_TARGET_SERVICE_PORT": "50053",
    "PACELINE_TARGET_SERVICE_PORT_GRPC": "50053",
}
"""What Kubernetes sets in the containers of a namespace with a Service `paceline-target`."""
THREADS = "PACELINE_TARGET_ENGINE__THREADS"


def environment(**variables: str) -> dict[str, str]:
    return {f"PACELINE_{name}": value for name, value in variables.items()}


def text_of(setting: Setting) -> str:
    """A valid value as a variable has it."""
    if setting.key == "cores":
        return "target=1"
    if setting.default is None or setting.default == ():
        return {int: "1", float: "1.0"}.get(setting.annotation, "x")
    return " ".join(setting.default) if isinstance(setting.default, tuple) else str(setting.default)


@pytest.mark.parametrize("kind", PROGRAMS.values(), ids=PROGRAMS)
def test_every_setting_has_a_variable_that_gives_it_and_nothing_else(kind: type[BaseModel]) -> None:
    for setting in every_setting(kind):
        given = {setting.variable: text_of(setting)}
        if setting.key.startswith("draft.") and setting.key != "draft.address":
            given["PACELINE_COORDINATOR_DRAFT__ADDRESS"] = "d:1"
        loaded: Any = gather(kind, None, {}, given)
        assert loaded.source_of(setting.key) == setting.variable
        found = value_of(loaded.config, setting.key)
        assert text_of(setting) == (" ".join(found) if isinstance(found, tuple) else str(found)), setting.key
        assert len(loaded.sources) == len(given)


def test_no_two_settings_share_a_variable() -> None:
    variables = [setting.variable for kind in PROGRAMS.values() for setting in every_setting(kind)]
    assert len(set(variables)) == len(variables)
    prefixes = [kind.variables for kind in PROGRAMS.values()]
    assert not any(one != other and one.startswith(other) for one in prefixes for other in prefixes)


def test_a_flag_overrides_a_variable_and_a_variable_the_file(tmp_path: Path) -> None:
    file = tmp_path / "target.toml"
    file.write_text("max_queue = 1\n[engine]\nthreads = 1\nkv_bytes = 1\nprefill_chunk = 1\n")
    variables = environment(TARGET_CONFIG=str(file), TARGET_ENGINE__THREADS="2", TARGET_ENGINE__KV_BYTES="2")
    loaded = parse(TargetConfig, "", ["--kv-bytes", "3"], variables)
    engine = loaded.config.engine
    assert (engine.prefill_chunk, engine.threads, engine.kv_bytes, engine.max_num_seqs) == (1, 2, 3, 256)
    keys = ("prefill_chunk", "threads", "kv_bytes", "max_num_seqs")
    sources = [loaded.source_of(f"engine.{key}") for key in keys]
    assert sources == [str(file), THREADS, "--kv-bytes", "default"]
    other = tmp_path / "other.toml"
    other.write_text("max_queue = 9\n")
    assert parse(TargetConfig, "", ["--config", str(other)], variables).config.max_queue == 9


def test_what_a_variable_writes_is_parsed_as_its_type() -> None:
    drafters = "model:a\n model:table:law=text,max_length=512"
    draft = gather(DraftConfig, None, {}, environment(DRAFT_DRAFTERS=drafters, DRAFT_ENGINE__PREFIX_REUSE="false"))
    assert draft.config.drafters == ("model:a", "model:table:law=text,max_length=512")
    assert draft.config.engine.prefix_reuse is False
    assert draft.config.engine.dtype == "fast", "a service's own default stays"
    none = gather(CoordinatorConfig, None, {}, environment(COORDINATOR_DRAFT__ADDRESS="none"))
    assert none.config.draft is None
    empty = gather(TargetConfig, None, {}, environment(TARGET_MODEL="", TARGET_ENGINE__THREADS="", TARGET_CONFIG=""))
    assert empty.sources == {}


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("PACELINE_TARGET_ENGINE_THREADS", "PACELINE_TARGET_ENGINE__THREADS"),
        ("PACELINE_TARGET_MAX_QEUE", "PACELINE_TARGET_MAX_QUEUE"),
        ("PACELINE_TARGET_PORT", "PACELINE_TARGET_SERVER__PORT"),
    ],
)
def test_a_variable_that_names_no_setting_is_refused_without_its_value(name: str, nearest: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        gather(TargetConfig, None, {}, {name: "50999"})
    assert caught.value.message == f"variable = {name!r}: must be the name of a setting, such as {nearest}"


def test_what_kubernetes_says_of_a_service_configures_nothing() -> None:
    given = SERVICE_LINKS | environment(TARGET_SERVER__PORT="7")
    loaded = gather(TargetConfig, None, {}, given)
    assert loaded.sources == {"server.port": "PACELINE_TARGET_SERVER__PORT"}
    with pytest.raises(InvalidInput, match="PACELINE_TARGET_SERVICE_HOST"):
        gather(TargetConfig, None, {}, {"PACELINE_TARGET_SERVICE_HOST": "10.0.0.7"})


@pytest.mark.parametrize(
    ("file", "arguments", "message", "source"),
    [
        ("", ["--port", "70000"], "server.port = 70000: must be valid (Input should be less than or", "--port"),
        ("", [], "engine.threads = 'many': must be valid (Input should be a valid integer", THREADS),
        ("[engine]\ndtype = 'int3'", [], "engine.dtype = 'int3': must be valid (", "FILE"),
        ("[engine]\ntreads = 3", [], "engine.treads = 3: must be valid (Extra inputs ", "FILE"),
        ("engine = 3", [], "engine = 3: must be valid (", "FILE"),
        ("engine = 3", ["--threads", "2"], "engine = 3: must be a table", "FILE"),
    ],
)
def test_an_error_names_what_gave_the_value(
    tmp_path: Path, file: str, arguments: list[str], message: str, source: str
) -> None:
    path = tmp_path / "target.toml"
    path.write_text(file)
    variables = {THREADS: "many"} if source == THREADS else {}
    with pytest.raises(InvalidInput) as caught:
        parse(TargetConfig, "", ["--config", str(path), *arguments], variables)
    assert caught.value.message.startswith(message)
    assert caught.value.message.endswith(f"; given by {source.replace('FILE', str(path))}")
    assert message.startswith(f"{caught.value.metadata['field']} = ")


def test_a_wrong_entry_of_a_list_is_traced_to_the_list(tmp_path: Path) -> None:
    file = tmp_path / "draft.toml"
    file.write_text('drafters = ["model:a", 3]\n')
    with pytest.raises(InvalidInput) as caught:
        parse(DraftConfig, "", ["--config", str(file)], {})
    assert caught.value.message.startswith("drafters.1 = 3: must be valid")
    assert caught.value.message.endswith(f"; given by {file}")
    with pytest.raises(InvalidInput, match=r"engine = .*reproducible.*; given by PACELINE_DRAFT_CONFIG|; given by "):
        file.write_text("[engine]\nreproducible = true\n")
        parse(DraftConfig, "", ["--config", str(file)], {})


def test_a_service_reads_its_environment_and_ends_with_one_line_if_it_is_wrong() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "target_service", "--port", "0"],
        env=os.environ | {"PACELINE_TARGET_ENGINE__MAX_NUM_SEQS": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 2
    (line,) = [line for line in ended.stderr.splitlines() if " ERROR " in line]
    assert "engine.max_num_seqs = '0': must be valid" in line
    assert line.endswith("; given by PACELINE_TARGET_ENGINE__MAX_NUM_SEQS")
