"""What the fuzzer found in files that users give: each is refused by name, in the words of its reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.protocol.errors import InvalidInput
from tests.fuzz.checkpoint_files import checkpoints, load_checkpoint, write_files
from tests.fuzz.files_surface import KINDS

READERS = {kind.name: kind for kind in KINDS}
DEEP = b"[" * 100_000
DIGITS = b"9" * 5_000
JSON_READERS = (
    "saved response", "trace", "Spec-Bench questions", "texts to train on", "branching points", "draft's manifest",
    "model's config.json", "coordinator's records", "speculative_config",
)  # fmt: skip
TEXT_READERS = ("draft's manifest", "endpoints", "coordinator's records", "model's config.json", "scenario", "corpus")


def read(tmp_path: Path, name: str, content: bytes) -> Any:
    kind = READERS[name]
    (tmp_path / kind.file).write_bytes(content)
    return kind.read(tmp_path / kind.file)


@pytest.mark.parametrize("content", [DEEP, b'{"a": ' + DIGITS + b"}"], ids=["deep", "digits"])
@pytest.mark.parametrize("name", JSON_READERS)
def test_json_that_the_library_cannot_follow_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    with pytest.raises(InvalidInput):
        read(tmp_path, name, content)


def size_with(**change: Any) -> bytes:
    right = json.loads(READERS["model's config.json"].contents[0])
    return json.dumps(right | change).encode()


def round_of(milliseconds: float) -> bytes:
    response = json.loads(READERS["saved response"].contents[0])
    response["paceline"]["rounds"][0]["round_ms"] = milliseconds
    return json.dumps(response).encode()


@pytest.mark.parametrize(
    ("name", "content", "names"),
    [
        *((name, b"\xff\xfe", "UTF-8") for name in TEXT_READERS),
        ("gateway's configuration", b"model = " + DEEP, "a readable TOML file"),
        ("coordinator's records", b'{"lines": {}}\n', "records.jsonl line 1"),
        ("draft's manifest", b'{"format": "paceline-draft/1", "layers": ["x"], "target": {}}', "manifest.json"),
        ("model's config.json", b'{"text_config": [1]}', "text_config"),
        ("model's config.json", size_with(num_key_value_heads=1.5), "config num_key_value_heads"),
        ("model's config.json", size_with(hidden_size=0), "config hidden_size"),
        ("model's config.json", size_with(vocab_size=10**400), "config vocab_size"),
        *(("saved response", round_of(value), "rounds[0].round_ms") for value in (10**400, float("nan"), -1)),
        *(("shard", content, "a whole .npz") for content in (b"", b"PK\x03\x04 and", b"\x93NUMPY\x01\x00v\x00{'d")),
    ],
)
def test_what_no_reader_takes_is_refused_by_name(tmp_path: Path, name: str, content: bytes, names: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        read(tmp_path, name, content)
    assert names in refused.value.message


WHOLE = "speculators draft's folder, whole and consistent"


@pytest.mark.parametrize(
    ("folder", "change", "said"),
    [
        ("eagle1", {"hidden_act": "no such"}, "EAGLE draft's folder"),
        ("eagle3", {"rms_norm_eps": []}, "rms_norm_eps = "),
        ("speculators", {"transformer_layer_config": 5}, WHOLE),
        ("speculators", {"speculators_config": {"proposal_methods": [{"accept_tolerance": "x"}]}}, WHOLE),
        ("block z-lab", {"block_size": []}, "block_size = "),
        ("mtp speculators", {"num_nextn_predict_layers": "x"}, "mtp draft's folder"),
        ("mtp deepseek_v3", {"num_nextn_predict_layers": "x"}, "a target's folder"),
        ("mtp qwen3_next", {"moe_intermediate_size": 1 << 40}, "weights of config.json's qwen3_next layers"),
        ("mtp qwen3_next", {"num_hidden_layers": 1 << 53}, "num_hidden_layers = .*: must be a whole"),
        ("speculators", {"transformer_layer_config": {"num_hidden_layers": 1 << 53}}, r"number in \[1, 512\]"),
        ("block z-lab", {"head_dim": 1 << 32}, r"head_dim = 4294967296: must be a whole number in \[1, 16384\]"),
    ],
)
def test_a_draft_with_a_wrong_setting_is_refused(
    tmp_path: Path, folder: str, change: dict[str, Any], said: str
) -> None:
    """Of a target's own prediction any error, and sizes that memory or time don't suffice for, too."""
    files = checkpoints()[folder]
    config = json.dumps(json.loads(files["config.json"]) | change).encode()
    write_files(tmp_path, {**files, "config.json": config})
    with pytest.raises(InvalidInput, match=said):
        load_checkpoint(tmp_path)
