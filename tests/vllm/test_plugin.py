"""The plugin in a vLLM that is a fake: which speculator its runner gets."""

from __future__ import annotations

import logging
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from paceline.protocol.errors import Unsupported
from paceline_vllm import plugin
from tests.vllm.fakes import config, put_module

ROOT = Path(__file__).resolve().parents[2]


def place(monkeypatch: pytest.MonkeyPatch, version: str = "0.33.0") -> ModuleType:
    """The module with the name, as vLLM has it; ours gives the word `drafts`."""
    put_module(monkeypatch, "vllm", __version__=version)
    monkeypatch.setitem(
        sys.modules, "paceline_vllm.speculator", put_module(monkeypatch, "paceline_fake", DraftSpeculator=ours)
    )
    return put_module(monkeypatch, plugin.PLACES[0], init_speculator=own)


def own(vllm_config: Any, device: str, req_states: str) -> str:
    return f"vllm's on {device} with {req_states}"


def ours(vllm_config: Any, device: str, req_states: str) -> str:
    return f"drafts on {device} with {req_states}"


@pytest.mark.parametrize(
    ("asks", "further"),
    [
        (True, {"paceline": {"draft": {"address": "127.0.0.1:1"}}}),
        (False, {"paceline": {}}),
        (False, {}),
        (False, SimpleNamespace()),
    ],
)
def test_the_runner_gets_drafts_where_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, asks: bool, further: Any
) -> None:
    spec_decode = place(monkeypatch)
    plugin.register()
    plugin.register()
    asked = config("")
    asked.additional_config = further
    got = spec_decode.init_speculator(asked, "cuda:0", "states")
    assert got == ("drafts" if asks else "vllm's") + " on cuda:0 with states"
    asked.speculative_config.use_ngram = lambda: False
    assert spec_decode.init_speculator(asked, "cuda:0", "states").startswith("vllm's")


def test_a_runner_that_was_imported_before_has_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    place(monkeypatch)
    runner = put_module(monkeypatch, plugin.PLACES[1], init_speculator=own)
    plugin.register()
    assert runner.init_speculator(config(""), "cpu", "states").startswith("drafts")


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0", "0.3.0", "1.0"])
def test_a_version_that_was_not_read_is_refused_where_drafts_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    spec_decode = place(monkeypatch, version)
    plugin.register()
    with pytest.raises(Unsupported, match=rf"{version} was not read; .* 0.32 and 0.33"):
        spec_decode.init_speculator(config(""), "cpu", "states")
    plain = config("")
    plain.additional_config = {}
    assert spec_decode.init_speculator(plain, "cpu", "states").startswith("vllm's")


def test_a_vllm_without_the_name_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    del place(monkeypatch).init_speculator
    with caplog.at_level(logging.ERROR):
        plugin.register()
    assert "no vllm.v1.worker.gpu.spec_decode.init_speculator" in caplog.text


def test_the_entry_point_is_this_and_loads_nothing_else() -> None:
    """vLLM loads it in every process wherever Paceline is installed."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    module, _, name = points["paceline"].partition(":")
    assert getattr(import_module(module), name) is plugin.register
    script = f"import {module}, sys; print({{'grpc', 'torch', 'numpy'}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "set()"
