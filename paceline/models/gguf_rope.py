"""Rotary positions of a GGUF file, as llama.cpp computes them without flags, in transformers' words."""

from __future__ import annotations

import math
from typing import Any

from paceline.models.gguf_header import GgufHeader
from paceline.models.gguf_keys import GgufKeys
from paceline.protocol.errors import require

MOST_POSITIONS = 1 << 24
FREQUENCIES = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (FREQUENCIES, LONG, SHORT)
_FACTOR, _ATTENTION, _KIND = "rope.scaling.factor", "rope.scaling.attn_factor", "rope.scaling.type"


def rope_parameters(
    keys: GgufKeys, header: GgufHeader, head_size: int, context: int, scalings: tuple[str, ...]
) -> dict[str, Any]:
    """The rotary parameters of a file.

    Args:
        keys: of the file.
        header: of the file, with its tensors of factors.
        head_size: of queries and keys.
        context: longest text that the file allows.
        scalings: `rope.scaling.type`s, and tensors, that both sides compute alike for the architecture.

    Raises:
        InvalidInput: naming the key or tensor.
    """
    rotary_size = keys.integer("rope.dimension_count", 2, head_size, head_size)
    is_whole = rotary_size == head_size or "partial" in scalings
    keys.require(is_whole, "rope.dimension_count", rotary_size, f"{head_size}, a whole head")
    base: dict[str, Any] = {"rope_theta": keys.number("rope.freq_base", 1.001, 1e12, 1e4)}
    if rotary_size != head_size:
        base["partial_rotary_factor"] = rotary_size / head_size
    kind = keys.text(_KIND, ("none", "linear", "yarn", "longrope"), "linear")
    older_name = keys.number("rope.scale_linear", 0.0, 1e6, 1.0)
    factor = keys.number(_FACTOR, 0.0, 1e6, older_name) or 1.0
    attention = keys.number(_ATTENTION, 0.0, 1e3, 1.0)
    original = keys.integer("rope.scaling.original_context_length", 1, MOST_POSITIONS, context)
    tensors = [name for name in ROPE_TENSORS if name in header.tensors]
    for name in tensors:
        require(name in scalings, "tensor", name, f"absent from a {header.architecture} file")
    if kind == "yarn":
        keys.require(kind in scalings and not tensors, _KIND, kind, "another for this architecture and its tensors")
        keys.require(factor >= 1.0, _FACTOR, factor, "at least 1")
        return base | {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "attention_factor": attention * (1.0 + 0.1 * math.log(factor)),
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        }
    keys.require(kind != "none" or factor == 1.0, _FACTOR, factor, "1 with scaling none")
    has_lists = tensors == [LONG, SHORT]
    fits = (kind == "longrope") == has_lists or (has_lists and header.architecture == "phi3")
    keys.require(fits, _KIND, kind, f"longrope with tensors {LONG} and {SHORT}, another without them")
    require(
        has_lists or tensors in ([], [FREQUENCIES]),
        "tensors",
        ", ".join(tensors),
        f"{FREQUENCIES}, or {LONG} and {SHORT}",
    )
    if not tensors and attention == 1.0 and (factor == 1.0 or "linear" in scalings):
        return base | ({"rope_type": "default"} if factor == 1.0 else {"rope_type": "linear", "factor": factor})
    lists = [_factors(header, name, rotary_size) for name in tensors] or [[1.0] * (rotary_size // 2)]
    # Factors that hold at any length are longrope whose two lists are one.
    return base | {
        "rope_type": "longrope",
        "long_factor": [factor * each for each in lists[0]],
        "short_factor": [factor * each for each in lists[-1]],
        "original_max_position_embeddings": original if has_lists else context,
        "attention_factor": attention,
    }


def _factors(header: GgufHeader, name: str, rotary_size: int) -> list[float]:
    tensor = header.tensors[name]
    require(
        tensor.shape == (rotary_size // 2,), f"shape of tensor {name}", list(tensor.shape), f"[{rotary_size // 2}]"
    )
    factors: list[float] = tensor.values().tolist()
    require(all(0.0 < each < math.inf for each in factors), f"tensor {name}", factors, "numbers above 0")
    return factors
