"""Numbers of a `config.json` within which libraries build anything at all: refused by name before one does."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from paceline.protocol.errors import InvalidInput, require

NESTED_KEYS = ("transformer_layer_config", "text_config", "llm_config", "language_config")
"""Keys under which multimodal models' and drafters' files keep the decoder's settings."""
MOST: Mapping[str, int] = {
    "num_hidden_layers": 512,
    "n_layer": 512,
    "num_layers": 512,
    "num_attention_heads": 1 << 12,
    "n_head": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 14,
    "qk_rope_head_dim": 1 << 14,
    "qk_nope_head_dim": 1 << 14,
    "v_head_dim": 1 << 14,
    "num_experts": 1 << 14,
    "num_local_experts": 1 << 14,
    "n_routed_experts": 1 << 14,
    "hidden_size": 1 << 20,
    "n_embd": 1 << 20,
    "intermediate_size": 1 << 24,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 31,
    "n_positions": 1 << 31,
}
"""The largest value of settings that count something, each at least 1 unless it may be none. Chosen: the deepest
models have some 130 layers, the widest heads 576 values. Libraries make as many layers and rotations before anybody
compares them with the tensors."""
_OR_NONE = ("num_experts", "num_local_experts", "n_routed_experts", "qk_nope_head_dim")
_ROPE = ("rope_parameters", "rope_scaling")
_POSITIVE = (
    *("rope_theta", "rope_local_base_freq", "factor", "original_max_position_embeddings", "partial_rotary_factor"),
    *("beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor", "short_factor", "long_factor"),
    *("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
)
"""Settings that are divided by, or whose logarithm is taken."""
_EPSILONS = (
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"),
    *("layernorm_epsilon", "rms_norm_epsilon"),
)


def refuse_numbers(where: str, config: Mapping[str, Any]) -> None:
    """Refuse a configuration of numbers that no model has.

    Args:
        where: what names the file in an error.
        config: as the file says it, the decoder's settings at its top or in a part of its own.

    Raises:
        InvalidInput: naming file, field, value and limit.
    """
    for path, part in _parts(config):
        for name, value in part.items():
            if value is not None:
                _refuse_number(f"{where}: {path}{name}", name, value)


def _parts(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The objects with a decoder's settings, each with the path of its fields: the whole, nested ones, rotations."""
    for path, part in (("", config), *_objects(config, "", NESTED_KEYS)):
        yield path, part
        for rope_path, rope in _objects(part, path, _ROPE):
            yield rope_path, rope
            yield from _objects(rope, rope_path, rope)  # rotations may differ by kind of layer


def _objects(config: Mapping[str, Any], path: str, names: Iterable[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    return ((f"{path}{name}.", config[name]) for name in names if isinstance(config.get(name), dict))


def _refuse_number(field: str, name: str, value: Any) -> None:
    if name in MOST:
        least, most = int(name not in _OR_NONE), MOST[name]
        for each in value if isinstance(value, list) else [value]:
            whole = isinstance(each, int) and not isinstance(each, bool) and least <= each <= most
            require(whole, field, value, f"a whole number in [{least}, {most}]")
    elif name in _POSITIVE:
        for each in value if isinstance(value, list) else [value]:
            require(_is_number(each) and each > 0, field, value, "a finite number above 0")
    elif name in _EPSILONS:
        require(_is_number(value) and 0 <= value <= 1, field, value, "a number in [0, 1]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise InvalidInput.of(field, value, "a finite number")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
