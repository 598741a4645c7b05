"""Model files that are damaged or truncated are refused by name, whoever reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from paceline.engine.loading import load_engine
from paceline.models.resolve import ModelSource
from paceline.models.tokenizer import load_tokenizer
from paceline.models.whole import refusing_files
from paceline.protocol.errors import DamagedFile, InvalidInput
from tests.engine import tiny
from tests.engine.tiny import THREAD
from tests.models import gguf_files
from tests.models.saving import save_with_tokenizer

HEADER = "Error while deserializing header"
READERS: tuple[Callable[[str], Any], ...] = (lambda name: load_engine(name, THREAD), load_tokenizer)


def refusal(load: Callable[[str], Any], name: str) -> str:
    with pytest.raises(DamagedFile) as caught:
        load(name)
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        (0, "empty"),
        (3, "where 3 are left"),
        (20, "its header needs 20 bytes at 4, where 16 are left"),
        (2000, "its header needs"),
        (20_000, "bytes beyond the file"),
    ],
)
def test_a_truncated_gguf_is_named(tmp_path: Path, kept: int, reason: str) -> None:
    file = gguf_files.write(tmp_path / "tiny.gguf")
    file.write_bytes(file.read_bytes()[:kept])
    for load in READERS:
        message = refusal(load, str(file))
        assert message.startswith(f"file '{file}': damaged or truncated (")
        assert message.endswith("); fetch it again")
        assert reason in message


def test_a_gguf_whose_text_is_no_text_is_not_called_json(tmp_path: Path) -> None:
    file = gguf_files.write(tmp_path / "tiny.gguf")
    for load in READERS:
        load(str(file))
    file.write_bytes(file.read_bytes().replace(b"llama.context_length", b"llama.context\xfflength"))
    for load in READERS:
        message = refusal(load, str(file))
        assert "JSON" not in message
        assert "can't decode byte 0xff" in message


def test_a_whole_gguf_of_another_architecture_is_not_called_damaged(tmp_path: Path) -> None:
    file = tmp_path / "abacus.gguf"
    gguf_files.write(file, "abacus")
    with pytest.raises(InvalidInput, match=r"^general.architecture = 'abacus': must be one of: llama, ") as caught:
        load_engine(str(file), THREAD)
    assert not isinstance(caught.value, DamagedFile)


DAMAGES: tuple[tuple[Callable[[bytes], bytes], str], ...] = (
    (lambda whole: whole[:-10], "incomplete metadata"),
    (lambda whole: whole[:100], "invalid header length"),
    (lambda whole: b"", "header too small"),
    (lambda whole: b"<!DOCTYPE html><title>Not found</title>", "header too large"),
    (lambda whole: whole.replace(b'"F32"', b'"F99"', 1), "`F99`"),
)


def test_the_damaged_shard_is_named(tmp_path: Path) -> None:
    model = tiny.random_model(tiny.llama())
    save_with_tokenizer(model, tmp_path)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    (tmp_path / "model.safetensors").unlink(missing_ok=True)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    load_engine(str(tmp_path), THREAD)
    whole = shards[1].read_bytes()
    for damage, reason in DAMAGES:
        shards[1].write_bytes(damage(whole))
        message = refusal(READERS[0], str(tmp_path))
        assert message.startswith(f"file '{shards[1]}': damaged or truncated ({HEADER}: ")
        assert reason in message
        assert message.endswith("); fetch it again")


def test_the_damaged_file_of_a_hub_model_is_the_cached_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    monkeypatch.setattr("transformers.utils.hub.cached_file", lambda location, name: str(tmp_path / name))
    hub = ModelSource("some/model", "hub", "some/model")
    with pytest.raises(DamagedFile, match=r"model\.safetensors': damaged"), refusing_files(hub, hub.name, "whole"):
        raise SafetensorError("header too small")


class PanicException(BaseException):
    """As libraries written in Rust have it."""


MUST_BE_WHOLE = r"^model = 'tiny': must be whole \(\w+: '?by zero'?\)$"


@pytest.mark.parametrize(
    ("error", "becomes", "message"),
    [
        (ZeroDivisionError("by zero"), InvalidInput, MUST_BE_WHOLE),
        (PanicException("by zero"), InvalidInput, MUST_BE_WHOLE),
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
        (InvalidInput("as it was"), InvalidInput, "^as it was$"),
    ],
)
def test_whatever_a_library_raises_names_the_model_and_refusals_and_interrupts_stay_what_they_are(
    tmp_path: Path, error: BaseException, becomes: type[BaseException], message: str
) -> None:
    folder = ModelSource("tiny", "folder", str(tmp_path))
    with pytest.raises(becomes, match=message), refusing_files(folder, folder.name, "whole"):
        raise error
