"""What a folder's `config.json` states is honoured: served logits are those of transformers' own forward pass.

Texts are long enough that rotations, windows and caps show, and chunks and one by one are both computed.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from paceline.engine.interface import Engine, Logits
from paceline.engine.loading import load_engine
from paceline.protocol.errors import InvalidInput, Unsupported
from paceline.runtime.config import EngineSettings
from tests.engine import tiny
from tests.engine.tiny import THREAD, chain, step
from tests.models.saving import save_with_tokenizer

CONTEXT = 256
TOLERANCE = 2e-4
"""Largest difference, as a share of the largest logit: float32 in another order."""
SHAPE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": tiny.VOCAB, "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3, "pad_token_id": 0,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config,
    "gemma2": transformers.Gemma2Config, "gemma3": transformers.Gemma3TextConfig, "phi3": transformers.Phi3Config,
}  # fmt: skip
HALF = [1.0 + place / 4 for place in range(8)]
OLD = {"rope_parameters": None}
"""Files of older versions of the library have no such field; nor `layer_types`."""
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]


def rotated(kind: str, factor: float = 4.0, key: str = "rope_type", **more: Any) -> dict[str, Any]:
    own = {"original_max_position_embeddings": 64} if kind in ("yarn", "llama3") else {}
    return OLD | {"rope_scaling": {key: kind, "factor": factor, **own, **more}}


STATED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "theta": OLD | {"rope_theta": 500.0},
    "linear": rotated("linear", key="type"),
    "linear, by its later name": rotated("linear"),
    "yarn": rotated("yarn", beta_fast=16),
    "yarn with a factor of its own": rotated("yarn", attention_factor=0.7),
    "llama3": rotated("llama3", 8.0, low_freq_factor=1.0, high_freq_factor=4.0),
    "longrope": OLD
    | {
        "original_max_position_embeddings": 128,
        "rope_scaling": {"type": "longrope", "short_factor": HALF, "long_factor": [2 * each for each in HALF]},
    },
    "dynamic": rotated("dynamic", 2.0, "type"),
    "tied": {"tie_word_embeddings": True},
    "a wider embedding": {"vocab_size": 128},
    "biases": {"attention_bias": True},
    "windows": {"layer_types": None, "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1},
    "caps": {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 40},
    "layers of two kinds": {
        "sliding_window": 6, "use_sliding_window": True,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "a part rotated": OLD | {"partial_rotary_factor": 0.5},
    "another activation": {"hidden_act": "gelu", "hidden_activation": "gelu"},
    "epsilon": {"rms_norm_eps": 0.3},
}  # fmt: skip
_PHI3_ROTATIONS = ("linear", "linear, by its later name", "yarn", "yarn with a factor of its own", "llama3")
REFUSED = {
    ("llama", "windows"), ("llama", "layers of two kinds"),
    *(("phi3", name) for name in (*_PHI3_ROTATIONS, "dynamic")),
    *(("gemma3", name) for name in ("linear", "longrope", "dynamic")),
    *((family, "caps") for family in ("llama", "qwen2", "qwen3", "phi3")),
    *((family, "a part rotated") for family in ("llama", "qwen2", "qwen3", "gemma2", "gemma3")),
}  # fmt: skip
"""What transformers has no such setting for, and would drop without a word; rotations that it refuses itself, or that
it reads under another name alone."""
NO_CHANGE = {*((family, "dynamic") for family in CONFIGS), *((family, "biases") for family in ("qwen2", "phi3"))}
"""A rotation that moves beyond the trained length alone; biases that a family always has, or never."""
QUICK = {
    ("llama", "nothing"), ("llama", "yarn"), ("qwen2", "windows"), ("gemma3", "linear"),
    ("gemma3", "linear, by its later name"), ("phi3", "longrope"), ("gemma2", "caps"),
    ("qwen3", "a wider embedding"), ("llama", "caps"), ("gemma3", "a part rotated"),
}  # fmt: skip
TEXT = tuple(int(each) for each in np.random.default_rng(5).integers(1, tiny.VOCAB, 100))


def written(folder: Path, family: str, stated: dict[str, Any]) -> Path:
    """A random model's folder whose config.json states this beside the shape."""
    kinds = {"layer_types": KINDS} if family.startswith("gemma") else {}
    config = CONFIGS[family](**{**SHAPE, **kinds, **{k: v for k, v in stated.items() if k in SHAPE}})
    for name in ("tie_word_embeddings", "attention_bias"):
        setattr(config, name, stated.get(name, False))
    save_with_tokenizer(tiny.biased(tiny.random_model(config)), folder, **stated)
    return folder


def own_logits(folder: Path) -> Logits:
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model: PreTrainedModel = loaded.eval()
    with torch.inference_mode():
        rows: Logits = model(input_ids=torch.tensor([TEXT])).logits[0, :, : tiny.VOCAB].numpy()
    return rows


def served_logits(engine: Engine) -> Logits:
    """The engine's: a chunk, then tokens one by one, then another chunk."""
    engine.open(1, len(TEXT) + 4)
    pieces = [(0, 40), *((place, place + 1) for place in range(40, 60)), (60, len(TEXT))]
    rows = [step(engine, chain(1, start, TEXT[start:end])).copy() for start, end in pieces]
    engine.close(1)
    return np.concatenate(rows)[:, : tiny.VOCAB]


def same_logits(folder: Path) -> Logits:
    engine = load_engine(str(folder), EngineSettings(threads=1, max_model_len=128, prefill_chunk=64))
    served, own = served_logits(engine), own_logits(folder)
    assert float(np.abs(served - own).max() / np.abs(own).max()) < TOLERANCE
    return own


EVERY = itertools.product(CONFIGS, STATED)
CASES = [pytest.param(*case, marks=() if case in QUICK else pytest.mark.full) for case in EVERY]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_what_a_file_states_is_honoured_or_refused(tmp_path: Path, family: str, name: str) -> None:
    folder = written(tmp_path / "stated", family, STATED[name])
    if (family, name) in REFUSED:
        with pytest.raises((InvalidInput, Unsupported)):
            load_engine(str(folder), THREAD)
        return
    stated = same_logits(folder)
    plain = own_logits(written(tmp_path / "plain", family, {}))
    changes = name != "nothing" and (family, name) not in NO_CHANGE
    assert changes != np.allclose(stated, plain, atol=1e-6), "the setting is one that shows"


def test_a_head_that_is_stored_is_used_though_the_file_calls_it_tied(tmp_path: Path) -> None:
    """transformers keeps both where they differ, and ties them where they are equal."""
    folder = written(tmp_path, "llama", {"tie_word_embeddings": True})
    file = folder / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    for factor, changes in ((1.0, False), (2.0, True)):
        head = tensors["model.embed_tokens.weight"] * factor
        save_file(tensors | {"lm_head.weight": head}, file, {"format": "pt"})
        plain = own_logits(written(tmp_path / f"plain {factor}", "llama", {"tie_word_embeddings": True}))
        assert changes != np.allclose(same_logits(folder), plain, atol=1e-6)
