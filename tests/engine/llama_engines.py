"""Engines of llama.cpp over tiny GGUF files, and the same files read whole."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.engine.interface import Logits
from paceline.engine.llama.engine import LlamaEngine
from paceline.engine.loading import load_engine
from paceline.runtime.config import EngineSettings
from tests.engine import tiny
from tests.models import gguf_files, llama_cpp

FLOAT32 = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attn": "off"}


def llama_settings(**settings: Any) -> EngineSettings:
    return EngineSettings.model_validate({"engine": "llama", "threads": 1, "llama": FLOAT32, **settings})


def llama(file: Path | None = None, **settings: Any) -> LlamaEngine:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as home:
        patch.setenv("PACELINE_HOME", home)
        engine = load_engine(str(file or tiny_file()), llama_settings(**settings))
    assert isinstance(engine, LlamaEngine)
    return engine


@functools.cache
def tiny_file() -> Path:
    return gguf_files.write(Path(tempfile.mkdtemp()) / "tiny.gguf", keys={"context_length": tiny.CONTEXT})


class PlainLlama(tiny.Plain):
    """llama.cpp's own pass over a whole history, which shares nothing with sessions and steps."""

    def __init__(self, file: Path) -> None:
        self._whole = llama_cpp.PlainModel(file, tiny.CONTEXT)
        self._width = len(gguf_files.tokens())

    def logits(self, history: Sequence[int]) -> Logits:
        row: Logits = self._whole.logits(history, last_only=True)[0]
        return row


@functools.cache
def plain() -> tiny.Plain:
    return PlainLlama(tiny_file())
