"""Numbers and settings of a `config.json` that are refused by name before a library builds or ignores them.

No list of settings that would change logits and that the library silently drops is complete. This one has the kinds
that published models have: rotations, windows, caps, scales. A setting without a field in the model type's
configuration is never read by its code.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from paceline.protocol.errors import InvalidInput, Unsupported, require

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

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
_ROPE_KEYS = ("rope_parameters", "rope_scaling")
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
        for rope_path, rope in _objects(part, path, _ROPE_KEYS):
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


_CHANGES_LOGITS = re.compile(
    r"\w*(softcap\w*|logit_scale|logits_scaling|lm_head_multiplier|_multiplier|_multipliers)"
    r"|sliding_window|attention_chunk_size|query_pre_attn_scalar|clip_qkv|alibi|use_alibi|attention_sinks?"
    r"|no_rope_layers|no_rope_layer_interval|nope_layer_interval|rope_local_base_freq|use_qk_norm|qk_norm"
    r"|scale_embeddings?|embed_scale|scale_depth|scale_emb|dim_model_base|residual_scale|attn_temperature_tuning"
)
"""Names of settings that change logits wherever they are honoured."""
_NO_CHANGE = (None, False, 1, 1.0)
_ROPE = "rope_parameters"
_WINDOW = "sliding_window"
_ROPE_ALIASES = {"su": "longrope", "mrope": "default"}
"""Other names of rope types."""
_PARTIAL = "partial_rotary_factor"
_OF_EVERY_ROPE = frozenset({"rope_type", "type", "rope_theta", _PARTIAL})
_HARMLESS_OF_ROPE = frozenset({"finetuned", "mrope_section", "mrope_interleaved", "original_max_position_embeddings"})
"""A note on training, parts of images' positions, and a length that only some types read."""
_ROPE_SETTINGS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "yarn": frozenset(
        {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
    ),
    "longrope": frozenset({"factor", "attention_factor", "short_factor", "long_factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
    "proportional": frozenset(),
}
"""The settings of each rope type that transformers reads."""


def refuse_ignored(where: str, raw: Mapping[str, Any], config: PreTrainedConfig) -> None:
    """Refuse a configuration of which the library reads only a part.

    Args:
        where: what names the file in an error.
        raw: the file.
        config: what transformers has made of it.

    Raises:
        InvalidInput: rotations that contradict each other, of an unknown type or with unknown fields.
        Unsupported: a setting that the model type doesn't have.
    """
    text: Any = config.get_text_config()
    own = next((raw[name] for name in NESTED_KEYS if isinstance(raw.get(name), dict)), raw)
    for part in (raw, own) if own is not raw else (raw,):
        _refuse_contradiction(where, part)
        for field in ("rope_scaling", _ROPE):
            if isinstance(part.get(field), dict):
                for path, rope in _ropes(field, part[field]):
                    _refuse_rope(f"{where}: {path}", rope, text)
                    _refuse_dropped(f"{where}: {path}", rope, text)
    _refuse_unread(where, own, text)


def _refuse_unread(where: str, own: Mapping[str, Any], text: Any) -> None:
    names = {*dir(type(text)), *type(text).attribute_map}
    with suppress(Exception):  # some can't be made without arguments
        names |= vars(type(text)()).keys()
    for name, value in own.items():
        if name in names or not _CHANGES_LOGITS.fullmatch(name) or value in _NO_CHANGE:
            continue
        length = getattr(text, "max_position_embeddings", None)
        if name == _WINDOW and (own.get("use_sliding_window") is False or (length and value >= length)):
            continue
        raise Unsupported(
            f"{where}: {name} = {value!r}: model type {text.model_type} has no such setting in transformers, which "
            "would ignore it"
        )


def refuse_ignored_rotation(where: str, model: PreTrainedModel) -> None:
    """Refuse a model that rotates whole heads though its configuration says that only a part of each is rotated.

    Raises:
        Unsupported: naming the part.
    """
    text: Any = model.config.get_text_config()
    if getattr(text, "is_heterogeneous", False) or hasattr(text, "qk_rope_head_dim"):
        return  # heads of several widths, or rotated parts of a width of their own
    width = getattr(text, "head_dim", None)
    if not width:
        return
    for path, rope in _ropes(_ROPE, getattr(text, _ROPE, None) or {}):
        part = rope.get(_PARTIAL, getattr(text, _PARTIAL, None))
        own = f"{path.partition('.')[2]}_inv_freq".removeprefix("_")
        if part is None or rope.get("rope_type") == "proportional" or int(width * part) == width:
            continue
        frequencies = (each for name, each in model.named_buffers() if name.endswith(f".{own}"))
        if any(2 * each.shape[-1] == width for each in frequencies):
            raise Unsupported(
                f"{where}: {_PARTIAL} = {part}: model type {text.model_type} has no such setting in "
                f"transformers, which would ignore it and rotate whole heads of {width}"
            )


def _ropes(path: str, rope: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A rotation, or one for each kind of layer."""
    kinds = {f"{path}.{kind}": each for kind, each in rope.items() if isinstance(each, dict)}
    yield from kinds.items() if kinds else ((path, rope),)


def _refuse_rope(path: str, rope: Mapping[str, Any], text: Any) -> None:
    names = {
        _ROPE_ALIASES.get(str(rope[name]), str(rope[name]))
        for name in ("rope_type", "type")
        if rope.get(name) is not None
    }
    if len(names) > 1:
        raise InvalidInput.of(f"{path}.type", rope["type"], f"{rope['rope_type']!r}, its rope_type")
    name = next(iter(names), "default")
    if name not in _ROPE_SETTINGS:
        raise InvalidInput.of(f"{path}.rope_type", name, f"one of {', '.join(_ROPE_SETTINGS)}")
    known_keys = (
        _OF_EVERY_ROPE | _HARMLESS_OF_ROPE | _ROPE_SETTINGS[name] | set(text.ignore_keys_at_rope_validation or ())
    )
    unknown_keys = sorted(key for key in rope.keys() - known_keys if rope[key] is not None)
    if unknown_keys:
        limit = f"absent: rope type {name} reads {', '.join(sorted(_ROPE_SETTINGS[name])) or 'no such setting'}"
        raise InvalidInput.of(f"{path}.{unknown_keys[0]}", rope[unknown_keys[0]], limit)


def _refuse_dropped(path: str, rope: Mapping[str, Any], text: Any) -> None:
    """Refuse a rotation that is not among those that the library has read from the file."""
    ropes = [each for _, each in _ropes("", getattr(text, _ROPE, None) or {})]
    if not any(_type_of(each) == _type_of(rope) and _agree(each, rope) for each in ropes):
        setting = getattr(text, _ROPE, None)
        raise Unsupported(
            f"{path} = {dict(rope)!r}: transformers takes it for {setting!r} in model type {text.model_type}"
        )


def _type_of(rope: Mapping[str, Any]) -> str:
    name = rope.get("rope_type") or rope.get("type") or "default"
    return _ROPE_ALIASES.get(name, name)


def _agree(rope: Mapping[str, Any], file_rope: Mapping[str, Any]) -> bool:
    """Whether settings that both have are the same."""
    common = rope.keys() & file_rope.keys() - {"type", "rope_type"}
    return all(file_rope[name] is None or rope[name] == file_rope[name] for name in common)


def _refuse_contradiction(where: str, part: Mapping[str, Any]) -> None:
    """Refuse settings that stand twice with different values, since it is unclear which one the library takes."""
    old, new = part.get("rope_scaling"), part.get(_ROPE)
    if not isinstance(new, dict):
        return
    values = {"rope_theta": part.get("rope_theta"), _PARTIAL: part.get(_PARTIAL)}
    values |= old if isinstance(old, dict) else {}
    values["rope_type"] = values.get("rope_type") or values.pop("type", None)
    flat = {**new, "rope_type": new.get("rope_type") or new.get("type")}
    for name, value in values.items():
        if value is not None and flat.get(name) is not None and flat[name] != value:
            limit = f"{flat[name]!r}, as in rope_parameters, or stand in one place only"
            raise InvalidInput.of(f"{where}: {name}", value, limit)
    if isinstance(old, dict) and old and not new.keys() >= old.keys() - {"type"}:
        raise InvalidInput.of(f"{where}: rope_scaling", old, f"the same as rope_parameters = {new}")
