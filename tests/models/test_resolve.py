"""What a model's name stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.models.resolve import PROVENANCE_FILE, is_pulled, model_home, pulled_path, resolve
from paceline.protocol.errors import InvalidInput


def test_the_home_is_named_or_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    assert model_home() == tmp_path
    monkeypatch.delenv("PACELINE_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.platform", "linux")
    assert model_home() == tmp_path / "cache" / "paceline"


def test_a_pulled_model_has_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    with pytest.raises(InvalidInput, match=r"run: paceline pull smollm2-135m"):
        resolve("smollm2-135m")
    folder = pulled_path("smollm2-135m")
    folder.mkdir(parents=True)
    assert not is_pulled("smollm2-135m")
    (folder / PROVENANCE_FILE).write_text("{}")
    found = resolve("smollm2-135m#layers=0,1,2,29")
    assert (found.kind, found.location, found.layers) == ("folder", str(folder), (0, 1, 2, 29))
    assert found.name == "smollm2-135m#layers=0,1,2,29"


def test_folders_files_and_hub_ids(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"")
    folder = resolve(str(tmp_path))
    assert (folder.kind, folder.name, folder.gguf) == ("folder", tmp_path.name, None)
    gguf = resolve(str(tmp_path / "tiny.gguf"))
    assert (gguf.kind, gguf.location, gguf.name) == ("gguf", str(tmp_path), "tiny")
    assert gguf.gguf == tmp_path / "tiny.gguf"
    assert resolve("HuggingFaceTB/SmolLM2-135M-Instruct").kind == "hub"
    assert resolve("gpt2").kind == "hub"
    assert resolve("table:vocab=9").kind == "table"


@pytest.mark.parametrize("name", ["", "/no/such", "missing.gguf", "a b", "table:vocab=9#layers=1", "table:x=1"])
def test_names_of_nothing_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput):
        resolve(name)


@pytest.mark.parametrize("layers", ["", "1,0", "-1"])
def test_bad_layers_are_refused(tmp_path: Path, layers: str) -> None:
    with pytest.raises(InvalidInput, match="ascending layer numbers"):
        resolve(f"{tmp_path}#layers={layers}")
