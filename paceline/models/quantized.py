"""Checkpoints whose weights other tools have quantized: unpacked into the floats that they stand for, or refused.

What a method's weights stand for is a model of its own, whose text is served. Activations keep their precision:
rounding them, too, is what some kernels do, and nothing of the files.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.models.compressed import METHOD, compressed_packing
from paceline.models.packed import Packing, awq, gptq
from paceline.protocol.errors import InvalidInput, require

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_ENTRIES = ("quantization_config", "compression_config", "quantization")
"""Keys of a `config.json` where tools write how they quantized: transformers', older compressed-tensors', MLX's."""
BITSANDBYTES = "bitsandbytes"
"""Its older files name no method."""


def quantization_entry(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The entry of a `config.json` about quantized weights, its own or its text model's; None: there is none."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        for key in _ENTRIES:
            entry = part.get(key)
            if isinstance(entry, Mapping) and entry:
                return entry
    return None


def without_quantization(config: PreTrainedConfig) -> PreTrainedConfig:
    """A configuration for weights that have been unpacked."""
    plain = copy.deepcopy(config)
    for part in (plain, plain.get_text_config()):
        for key in _ENTRIES:
            if hasattr(part, key):
                delattr(part, key)
    return plain


def method_of(entry: Mapping[str, Any]) -> str:
    """The method's name; the whole entry, where it has none."""
    method = entry.get("quant_method")
    if method is None and (entry.get("load_in_4bit") or entry.get("load_in_8bit")):
        return BITSANDBYTES
    return str(dict(entry) if method is None else method)


@dataclass(frozen=True)
class Unpacking:
    """The unpacking of a checkpoint's weights: by the library, with `arguments`, or by `paceline.models.packed`."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    packing: Packing | None = None


def unpacking(name: str, config: Mapping[str, Any]) -> Unpacking:
    """The unpacking of a checkpoint's weights; floats need none.

    Args:
        name: the model's, as shown to users.
        config: its `config.json`.

    Raises:
        InvalidInput: a method, or an option of one, that is not unpacked.
    """
    entry = quantization_entry(config)
    if entry is None:
        return Unpacking()
    method = method_of(entry)
    if method not in _METHODS:
        _refuse(name, method, f"absent, or one whose weights are unpacked ({', '.join(_METHODS)})")
    return _METHODS[method](name, entry)


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


def _fp8(name: str, entry: Mapping[str, Any]) -> Unpacking:
    from transformers import FineGrainedFP8Config

    scheme = entry.get("activation_scheme", "dynamic")
    limit = "dynamic: scales of activations that stand in the files are not applied"
    require(scheme == "dynamic", f"model {name}: quantization_config.activation_scheme", scheme, limit)
    return Unpacking({"quantization_config": FineGrainedFP8Config(dequantize=True)})


def _mxfp4(name: str, entry: Mapping[str, Any]) -> Unpacking:
    from transformers.utils.quantization_config import Mxfp4Config

    return Unpacking({"quantization_config": Mxfp4Config(dequantize=True)})


@dataclass(frozen=True)
class _EntryReader:
    """Reads a `quantization_config`; refusals name its keys."""

    model: str
    entry: Mapping[str, Any]

    def one_of(self, keys: tuple[str, ...], choices: tuple[Any, ...]) -> Any:
        """The value under the first of these keys that is there, else the first of the choices."""
        for key in keys:
            value = self.entry.get(key)
            if value is not None:
                value = value.lower() if isinstance(value, str) else value
                listing = " or ".join(map(repr, choices))
                kinds = {type(each) for each in choices}
                require(
                    type(value) in kinds and value in choices, self._field(key), value, f"{listing} to be unpacked"
                )
                return value
        return choices[0]

    def group_size(self, keys: tuple[str, ...]) -> int:
        """Inputs that share a scale; -1: all of them."""
        key, value = next(((key, self.entry[key]) for key in keys if key in self.entry), (keys[0], 128))
        valid = type(value) is int and (value == -1 or value > 0)
        require(valid, self._field(key), value, "-1 or a positive number")
        return int(value)

    def absent(self, *keys: str) -> None:
        """Refuse options that change the weights' meaning and aren't implemented."""
        for key in keys:
            require(not self.entry.get(key), self._field(key), self.entry.get(key), "absent: it is not unpacked")

    def _field(self, key: str) -> str:
        return f"model {self.model}: quantization_config.{key}"


def _awq(name: str, entry: Mapping[str, Any]) -> Unpacking:
    reader = _EntryReader(name, entry)
    reader.one_of(("bits", "w_bit"), (4,))
    reader.one_of(("version", "format"), ("gemm",))
    reader.one_of(("zero_point",), (True,))
    reader.absent("desc_act", "dynamic", "adapter", "rotation")
    return Unpacking(packing=awq(reader.group_size(("group_size", "q_group_size"))))


def _gptq(name: str, entry: Mapping[str, Any]) -> Unpacking:
    reader = _EntryReader(name, entry)
    bits = reader.one_of(("bits",), (4, 8, 2))
    format_ = reader.one_of(("checkpoint_format", "format"), ("gptq", "gptq_v2"))
    reader.one_of(("pack_dtype",), ("int32",))
    reader.absent("is_marlin_format", "dynamic", "adapter", "rotation")
    group_size = reader.group_size(("group_size",))
    return Unpacking(packing=gptq(bits, group_size, zeros_less_one=format_ == "gptq"))


_METHODS: Mapping[str, Callable[[str, Mapping[str, Any]], Unpacking]] = {
    "awq": _awq,
    METHOD: lambda name, entry: Unpacking(packing=compressed_packing(name, entry)),
    "fp8": _fp8,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}
"""fp8 and mxfp4 by transformers' own code, on GPUs as on CPUs: a kernel of its own would give other numbers."""
