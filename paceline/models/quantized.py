"""Checkpoints whose weights other tools have quantized: unpacked into the floats that they stand for, or refused.

What a method's weights stand for is a model of its own, whose text is served. Activations keep their precision:
rounding them, too, is what some kernels do, and nothing of the files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paceline.protocol.errors import InvalidInput, require

_ENTRIES = ("quantization_config", "compression_config", "quantization")
"""Keys of a `config.json` where tools write how they quantized: transformers', older compressed-tensors', MLX's."""
BITSANDBYTES = "bitsandbytes"
"""Its older files name no method."""


def quantization_entry(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a `config.json` says of quantized weights, its own or those of its text model; None: nothing."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        for key in _ENTRIES:
            entry = part.get(key)
            if isinstance(entry, Mapping) and entry:
                return entry
    return None


def method_of(entry: Mapping[str, Any]) -> str:
    """The method's name; the whole entry, where it has none."""
    named = entry.get("quant_method")
    if named is None and (entry.get("load_in_4bit") or entry.get("load_in_8bit")):
        return BITSANDBYTES
    return str(dict(entry) if named is None else named)


def unpacking(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments by which `from_pretrained` unpacks a checkpoint's weights; none for floats.

    Args:
        name: the model's, as shown to users.
        config: its `config.json`.

    Raises:
        InvalidInput: a method, or an option of one, that is not unpacked.
    """
    entry = quantization_entry(config)
    if entry is None:
        return {}
    method = method_of(entry)
    if method not in _UNPACKED:
        _refuse(name, method, f"absent, or one whose weights are unpacked ({', '.join(_UNPACKED)})")
    return _UNPACKED[method](name, entry)


def refuse_quantized(name: str, config: Mapping[str, Any]) -> None:
    """Refuse a drafter's folder whose weights are quantized by whatever method.

    Raises:
        InvalidInput: naming the method.
    """
    entry = quantization_entry(config)
    if entry is not None:
        _refuse(name, method_of(entry), "absent: drafters of this kind are read in floats")


def _refuse(name: str, method: str, limit: str) -> None:
    raise InvalidInput.of(
        f"model {name}: quantization_config.quant_method", method, f"{limit}; take its float weights"
    )


def _fp8(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    from transformers import FineGrainedFP8Config

    scheme = entry.get("activation_scheme", "dynamic")
    limit = "dynamic: scales of activations that stand in the files are not applied"
    require(scheme == "dynamic", f"model {name}: quantization_config.activation_scheme", scheme, limit)
    return {"quantization_config": FineGrainedFP8Config(dequantize=True)}


def _mxfp4(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    from transformers.utils.quantization_config import Mxfp4Config

    return {"quantization_config": Mxfp4Config(dequantize=True)}


_UNPACKED: Mapping[str, Callable[[str, Mapping[str, Any]], dict[str, Any]]] = {"fp8": _fp8, "mxfp4": _mxfp4}
"""By transformers' own code as it loads. On a GPU as on a CPU: a kernel of its own would give other numbers."""
