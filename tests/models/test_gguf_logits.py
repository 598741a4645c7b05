"""A GGUF file's logits are llama.cpp's: each key and tensor that changes them is honoured, or the file is refused."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.engine.loading import load_engine
from paceline.models.gguf import convert_gguf, gguf_sources
from paceline.models.gguf_config import ARCHITECTURES
from paceline.models.whole import load_whole, quiet_loading
from paceline.runtime.config import EngineSettings
from tests.engine.tiny import read
from tests.models import gguf_files, llama_cpp
from tests.models.gguf_files import CONTEXT, HIDDEN, LAYERS, values

IDS = np.random.default_rng(0).integers(5, 250, 40).tolist()
TOLERANCE = {"gemma": 1e-3}
"""As a share of the largest logit, by how an architecture's name begins: llama.cpp looks gelu up in halves."""
MATTERS = 0.1
"""How far a parameter must move the logits, as such a share, to be tested by them."""
LONG = np.array([1, 1.5, 2, 3, 5, 7, 9, 12], np.float32)
SHORT = np.array([1, 1, 1, 1.25, 1.5, 2, 3, 4], np.float32)
LLAMA_3 = np.array([1, 1, 1, 2.5, 8, 8, 8, 8], np.float32)
LISTS = {"rope_factors_long.weight": LONG, "rope_factors_short.weight": SHORT}
LONGROPE = {
    "context_length": 1024, "rope.scaling.original_context_length": 512, "rope.scaling.attn_factor": 1.25,
    "rope.scaling.type": "longrope",
}  # fmt: skip
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
WINDOW = {"attention.sliding_window": 8}
HEAD = {"output.weight": values("output.weight", (len(gguf_files.tokens()), HIDDEN))}
WIDTHS = {"attn_q": HIDDEN, "attn_k": HIDDEN // 2, "attn_v": HIDDEN // 2, "attn_output": HIDDEN, "ffn_up": 96}


def biases(*names: str) -> dict[str, np.ndarray | None]:
    return {f"blk.{i}.{name}.bias": values(f"{i}{name}", (WIDTHS[name],)) for i in range(LAYERS) for name in names}


ALL_HEADS = {f"blk.{i}.attn_{n}.weight": values(f"{i}{n}", (HIDDEN, HIDDEN)) for i in range(LAYERS) for n in "kv"}
LOCAL = {"rope.freq_base_swa": 50.0, "rope.scaling.factor": 8.0, "attention.sliding_window_pattern": 2}
HONOURED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *((name, {}, {}) for name in ARCHITECTURES),
    *((name, {"rope.scaling.factor": 4.0}, {}) for name in ("gemma2", "gemma3", "phi3")),
    ("qwen2", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {}),
    ("llama", {"rope.scale_linear": 4.0}, {}),
    *((name, YARN, {}) for name in ("llama", "qwen2")),
    ("llama", YARN | {"rope.scaling.attn_factor": 1.5}, {}),
    ("llama", YARN | {"rope.scaling.original_context_length": None}, {}),
    ("llama", {"rope.scaling.attn_factor": 1.5}, {}),
    ("llama", {}, {"rope_freqs.weight": LLAMA_3}),
    ("llama", {"rope.scaling.factor": 2.0}, {"rope_freqs.weight": LLAMA_3}),
    ("llama", LONGROPE, LISTS),
    ("phi3", LONGROPE, LISTS),
    ("phi3", LONGROPE | {"rope.scaling.type": None}, LISTS),
    ("phi3", {"rope.dimension_count": 12}, {}),
    ("llama", {"rope.freq_base": None}, {}),
    ("llama", {"attention.head_count_kv": 4}, ALL_HEADS),
    ("llama", {"attention.layer_norm_rms_epsilon": 0.1}, {}),
    *((name, {}, HEAD) for name in ("llama", "gemma3")),
    ("llama", {}, biases("attn_q", "attn_k", "attn_v")),
    ("llama", {}, biases("attn_output", "ffn_up")),
    ("qwen2", {}, biases("attn_q", "attn_k", "attn_v")),
    ("gemma3", {}, biases("attn_v")),
    *((name, WINDOW, {}) for name in ("gemma2", "gemma3")),
    ("gemma2", WINDOW | {"attention.sliding_window_pattern": [False, True]}, {}),
    ("gemma3", WINDOW | {"attention.sliding_window_pattern": 2}, {}),
    ("gemma3", WINDOW | LOCAL, {}),
    ("gemma2", {"attn_logit_softcapping": 2.0}, {}),
    *((name, {"final_logit_softcapping": 2.0}, {}) for name in ("gemma2", "gemma3")),
    ("qwen3moe", {"expert_used_count": 1}, {}),
]  # fmt: skip


def own_logits(file: Path) -> np.ndarray:
    """Logits of the model that we make of a file, through transformers' own attention."""
    with quiet_loading(), torch.inference_mode():
        model = load_whole(file.name, **gguf_sources(file), dtype="float32", attn_implementation="eager")
        rows: np.ndarray = model(input_ids=torch.tensor([IDS])).logits[0].numpy()
    return rows


@functools.cache
def plain_logits(architecture: str) -> np.ndarray:
    """llama.cpp's logits of the architecture's usual file."""
    with tempfile.TemporaryDirectory() as folder:
        return llama_cpp.logits(gguf_files.write(Path(folder) / "plain.gguf", architecture), IDS)


def share(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max() / np.abs(other).max())


@pytest.mark.parametrize(("architecture", "keys", "tensors"), HONOURED, ids=lambda value: str(value)[:60])
def test_what_changes_logits_is_honoured(
    tmp_path: Path, architecture: str, keys: Mapping[str, Any], tensors: Mapping[str, Any]
) -> None:
    file = gguf_files.write(tmp_path / "tiny.gguf", architecture, keys, tensors)
    expected = llama_cpp.logits(file, IDS)
    if keys or tensors:
        assert share(plain_logits(architecture), expected) > MATTERS
    assert share(own_logits(file), expected) < TOLERANCE.get(architecture[:5], 5e-5)


SERVED: dict[str, dict[str, Any]] = {
    "gemma3": WINDOW | LOCAL,
    "qwen2": YARN | {"tokenizer.ggml.pre": "qwen2"},
    "phi3": LONGROPE,
    "llama": {"rope.scaling.factor": 2.0},
}


@pytest.mark.parametrize("architecture", SERVED)
def test_engines_give_llama_cpps_logits_from_the_file_and_once_converted(tmp_path: Path, architecture: str) -> None:
    tensors = {"llama": {"rope_freqs.weight": LLAMA_3}, "phi3": LISTS}.get(architecture, {})
    file = gguf_files.write(tmp_path / "tiny.gguf", architecture, SERVED[architecture], tensors)
    expected = llama_cpp.logits(file, IDS)
    convert_gguf(file, tmp_path / "converted")
    for name in (file, tmp_path / "converted"):
        engine = load_engine(str(name), EngineSettings(threads=1, max_model_len=CONTEXT))
        assert share(read(engine, IDS), expected) < TOLERANCE.get(architecture[:5], 1e-4)
