"""TOML files and flags become one checked configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.local.service_process import Flags, write_config
from paceline.local.settings import ServeSettings, coordinator_flags, draft_flags, target_flags
from paceline.protocol.errors import InvalidInput
from paceline.runtime.config import CoordinatorConfig, DraftConfig, TargetConfig, load_config


def test_flags_override_the_file_and_leave_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "target.toml"
    file.write_text('model = "from-file"\n[engine]\nthreads = 3\nmax_num_seqs = 7\n')
    config = load_config(TargetConfig, file, {"engine.threads": 2, "model": None, "server.port": 0})
    assert config.model == "from-file"
    assert (config.engine.threads, config.engine.max_num_seqs) == (2, 7)
    assert config.server.port == 0
    assert config.tensor_parallel_size == 1, "the default stays"


@pytest.mark.parametrize(("kind", "port"), [(TargetConfig, 50053), (DraftConfig, 50052), (CoordinatorConfig, 50051)])
def test_a_section_given_in_part_keeps_its_other_defaults(kind: type[TargetConfig], port: int) -> None:
    config = load_config(kind, None, {"server.host": "0.0.0.0"})
    assert (config.server.host, config.server.port) == ("0.0.0.0", port)
    alone = load_config(CoordinatorConfig, None, {"target.tls_ca": "ca.crt"})
    assert alone.target.address == ("127.0.0.1:50053",)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("modle = 'x'", "modle"),
        ("[engine]\ntreads = 2", "engine.treads"),
        ("[server]\nport = 70000", "server.port"),
        ("[engine]\ndtype = 'int3'", "engine.dtype"),
    ],
)
def test_unknown_keys_and_bad_values_name_the_key(tmp_path: Path, text: str, key: str) -> None:
    file = tmp_path / "target.toml"
    file.write_text(text)
    with pytest.raises(InvalidInput) as caught:
        load_config(TargetConfig, file, {})
    assert caught.value.metadata["field"] == key


@pytest.mark.parametrize("text", ["model = ", None])
def test_an_unreadable_file_is_named(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "broken.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InvalidInput, match=r"broken\.toml"):
        load_config(TargetConfig, file, {})


def test_a_flag_below_a_value_that_is_no_table_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "target.toml"
    file.write_text("engine = 3\n")
    with pytest.raises(InvalidInput, match="engine = 3"):
        load_config(TargetConfig, file, {"engine.threads": 1})


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
    target: Flags = target_flags(settings, 3)
    draft: Flags = draft_flags(settings, 1)
    coordinator: Flags = coordinator_flags(settings, "h:1", "h:2")
    write_config(TargetConfig, tmp_path / "t", target)
    write_config(DraftConfig, tmp_path / "d", draft)
    write_config(CoordinatorConfig, tmp_path / "c", coordinator)
    read = load_config(TargetConfig, tmp_path / "t", {})
    assert (read.model, read.engine.threads, read.engine.max_model_len) == (settings.model, 3, 128)
    drafting = load_config(DraftConfig, tmp_path / "d", {})
    assert drafting.drafters == ("model:x",)
    assert (read.engine.quantization, drafting.engine.quantization) == ("int8", "none")
    served = load_config(CoordinatorConfig, tmp_path / "c", {})
    assert (served.seed, served.num_draft_tokens, served.target.address) == (9, 6, ("h:1",))
    assert served.draft is not None
    assert served.draft.address == ("h:2",)
