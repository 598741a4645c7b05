"""Tiny GGUF files of every architecture that is read: random weights in float32, two layers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGUFValueType
from tokenizers import pre_tokenizers

from tests.models.saving import TEMPLATE

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, CONTEXT = 64, 96, 2, 4, 2, 128
EXPERTS = 4
CONTROL, NORMAL = 3, 1
MERGES = (("Ġ", "Ġ"), ("Ġ", "t"), ("t", "h"), ("th", "e"), ("1", "2"), ("Ċ", "Ċ"))
WORDS = ("<s>", "</s>", "<turn>", "<more>", "<pad>")


def tokens() -> list[str]:
    """Special tokens, then every byte, then a few merges."""
    return [*WORDS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in MERGES)]


def write(
    file: Path,
    architecture: str = "llama",
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
) -> Path:
    """Write a file.

    Args:
        file: where to.
        architecture: as llama.cpp calls it.
        keys: instead of the usual ones, or beside them; without a first part the architecture's; None: absent.
        tensors: the same for tensors.
    """
    writer = gguf.GGUFWriter(str(file), architecture)
    named = {
        key if key.startswith(("general.", "tokenizer.", "split.")) else f"{architecture}.{key}": value
        for key, value in (keys or {}).items()
    }
    for key, value in (_keys(architecture) | named).items():
        if value is not None:
            _add(writer, key, value)
    for name, values in (_tensors(architecture, len(tokens())) | dict(tensors or {})).items():
        if values is not None:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {
        bool: GGUFValueType.BOOL,
        int: GGUFValueType.UINT32,
        float: GGUFValueType.FLOAT32,
        str: GGUFValueType.STRING,
    }
    if isinstance(value, list | tuple | bytes):
        writer.add_array(key, value)
    elif isinstance(value, int) and not 0 <= value < 1 << 32:
        writer.add_key_value(key, value, GGUFValueType.INT64)
    else:
        writer.add_key_value(key, value, kinds[type(value)])


def _keys(architecture: str) -> dict[str, Any]:
    listed = tokens()
    own: dict[str, Any] = {
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1000.0,
    }
    if architecture.endswith("moe"):
        own |= {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": 32}
    if architecture == "qwen2moe":
        own["expert_shared_feed_forward_length"] = 48
    if architecture == "gemma2":
        own |= {"attention.sliding_window": CONTEXT, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return {f"{architecture}.{key}": value for key, value in own.items()} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": listed,
        "tokenizer.ggml.token_type": [CONTROL] * len(WORDS) + [NORMAL] * (len(listed) - len(WORDS)),
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in MERGES],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": TEMPLATE,
    }


def _tensors(architecture: str, vocab_size: int) -> dict[str, np.ndarray]:
    width = HIDDEN // HEADS * KV_HEADS
    block: dict[str, tuple[int, ...]] = {
        "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attn_output": (HIDDEN, HIDDEN),
        "attn_q": (HIDDEN, HIDDEN), "attn_k": (width, HIDDEN), "attn_v": (width, HIDDEN),
        "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER),
    }  # fmt: skip
    if architecture == "phi3":
        for name in ("attn_q", "attn_k", "attn_v", "ffn_gate"):
            del block[name]
        block |= {"attn_qkv": (HIDDEN + 2 * width, HIDDEN), "ffn_up": (2 * INNER, HIDDEN)}
    if architecture in ("qwen3", "qwen3moe", "gemma3"):
        block |= {"attn_q_norm": (HIDDEN // HEADS,), "attn_k_norm": (HIDDEN // HEADS,)}
    if architecture in ("gemma2", "gemma3"):
        block |= {"post_attention_norm": (HIDDEN,), "post_ffw_norm": (HIDDEN,)}
    if architecture.endswith("moe"):
        for name in ("ffn_gate", "ffn_up", "ffn_down"):
            del block[name]
        block |= {
            "ffn_gate_inp": (EXPERTS, HIDDEN), "ffn_gate_exps": (EXPERTS, 32, HIDDEN),
            "ffn_up_exps": (EXPERTS, 32, HIDDEN), "ffn_down_exps": (EXPERTS, HIDDEN, 32),
        }  # fmt: skip
    if architecture == "qwen2moe":
        block |= {
            "ffn_gate_inp_shexp": (HIDDEN,), "ffn_gate_shexp": (48, HIDDEN), "ffn_up_shexp": (48, HIDDEN),
            "ffn_down_shexp": (HIDDEN, 48),
        }  # fmt: skip
    shapes = {f"blk.{layer}.{name}.weight": shape for layer in range(LAYERS) for name, shape in block.items()}
    shapes |= {"token_embd.weight": (vocab_size, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if architecture == "qwen2moe":
        shapes["output.weight"] = (vocab_size, HIDDEN)
    return {name: values(name, shape) for name, shape in shapes.items()}


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random values of a size at which every layer matters: norms around 1, attention that tells places apart."""
    drawn = np.random.default_rng([ord(letter) for letter in name]).standard_normal(shape, np.float32)
    if name.endswith("norm.weight"):
        return 1 + drawn / 4
    scale = 2.0 if ".attn_q" in name or ".attn_k" in name else 1.0
    return drawn * np.float32(scale / np.sqrt(shape[-1]) if len(shape) > 1 else 0.5)
