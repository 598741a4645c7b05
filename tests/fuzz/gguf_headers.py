"""GGUF files whose header lies: keys of odd values, or bytes that are mutated, then loaded."""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paceline.engine.loading import load_engine
from paceline.models.gguf_config import ARCHITECTURES
from paceline.models.tokenizer import load_tokenizer
from paceline.runtime.config import EngineSettings
from tests.fuzz.byte_mutations import mutated_bytes
from tests.models import gguf_files

FILE = "model.gguf"
_ODD = (
    0, 1, 2, 3, 5, 7, -1, 255, 1 << 20, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 10**15, (1 << 63) - 1, 0.0,
    0.5, 1e-30, 1e30, float("nan"), float("inf"), -1.0, "", "x", "linear", "yarn", "longrope", "none", "gpt2",
    "llama", True, False, [0], [1, 1], [True, False], [0.5] * 300, ["a", "b"], None,
)  # fmt: skip
_KEYS = (
    "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.key_length", "attention.value_length",
    "attention.sliding_window", "attention.sliding_window_pattern", "attention.scale", "attn_logit_softcapping",
    "final_logit_softcapping", "expert_count", "expert_used_count", "expert_feed_forward_length", "vocab_size",
    "rope.freq_base", "rope.freq_base_swa", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast",
    "general.alignment", "general.type", "general.name", "split.count", "tokenizer.chat_template",
    *(
        f"tokenizer.ggml.{key}"
        for key in (
            "model", "pre", "tokens", "token_type", "scores", "merges", "bos_token_id", "eos_token_id",
            "eot_token_id", "eos_token_ids", "unknown_token_id", "padding_token_id", "add_bos_token",
            "add_eos_token", "add_space_prefix",
        )
    ),
)  # fmt: skip
_TENSORS = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "output.weight",
    "blk.0.attn_q.weight",
    "blk.1.ffn_up.bias",
)
_SHAPES = ((8,), (1,), (64,), (64, 64), (4, 32, 64), (267, 64))


@functools.cache
def whole(architecture: str = "llama") -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return gguf_files.write(Path(folder) / FILE, architecture).read_bytes()


def mutated_gguf(rng: random.Random, folder: Path) -> Path:
    """Write a file of which some keys or tensors are others, or some bytes."""
    file = folder / FILE
    if rng.random() < 0.6:
        architecture = rng.choice(sorted(ARCHITECTURES))
        gguf_files.write(file, architecture, _odd_keys(rng), _odd_tensors(rng))
    else:
        file.write_bytes(whole(rng.choice(sorted(ARCHITECTURES))))
    if rng.random() < 0.5:
        content = file.read_bytes()
        header = content.index(b"token_embd") + rng.randrange(2000)
        file.write_bytes(mutated_bytes(rng, content[:header], content[-200:]) + content[header:])
    return file


def _odd_keys(rng: random.Random) -> Mapping[str, Any]:
    return {key: rng.choice(_ODD) for key in rng.sample(_KEYS, rng.randint(1, 3))}


def _odd_tensors(rng: random.Random) -> Mapping[str, np.ndarray | None]:
    if rng.random() < 0.7:
        return {}
    shape = rng.choice(_SHAPES)
    return {rng.choice(_TENSORS): rng.choice((None, np.ones(shape, np.float32), np.zeros(shape, np.float32)))}


def load_gguf(file: Path) -> None:
    """Load it as target and coordinator do. Raises what that raises."""
    load_tokenizer(str(file))
    load_engine(str(file), EngineSettings(threads=1, max_model_len=64, kv_bytes=1 << 20))
