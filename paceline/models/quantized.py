"""Checkpoints whose weights other tools have quantized: unpacked into the floats that they stand for, or refused.

What a method's weights stand for is a model of its own, whose text is served. Activations keep their precision:
rounding them, too, is what some kernels do, and nothing of the files.

Weights as llm-compressor writes them, which the library compressed-tensors unpacks into floats.

A `config.json` groups layers by what their weights are: whole numbers packed into integers, or numbers of eight bits,
each with scales. The floats are the library's own, in the precision of the scales.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from paceline.models.packed import Layer, Packing, awq, gptq
from paceline.protocol.errors import InvalidInput, require

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

METHOD = "compressed-tensors"
_PACK_QUANTIZED = "pack-quantized"
_FORMATS = (_PACK_QUANTIZED, "int-quantized", "float-quantized", "naive-quantized")
_MIXED_PRECISION = "mixed-precision"
_ABSENT = ("kv_cache_scheme", "sparsity_config", "transform_config", "moe_sparsity_config")
"""Settings that change more than the weights."""
_ABSENT_OF_GROUP = ("input_activations", "output_activations")
_ORDERS = (None, False, "weight", "static")
"""Orders of inputs during rounding, which nothing in the files depends on."""


def compressed_packing(name: str, entry: Mapping[str, Any]) -> Packing:
    """The packing of a checkpoint's layers.

    Args:
        name: the model's, as shown to users.
        entry: its `quantization_config`.

    Raises:
        InvalidInput: naming an option that is not unpacked, or that the library isn't installed.
    """
    prefix = f"model {name}: quantization_config."
    limit = "another, or the package compressed-tensors installed (pip install 'paceline[compressed]')"
    require(find_spec("compressed_tensors") is not None, f"{prefix}quant_method", METHOD, limit)
    _refuse_options(prefix, entry)
    from compressed_tensors.quantization import QuantizationConfig

    try:
        groups = QuantizationConfig.model_validate(dict(entry)).config_groups
    except ValueError as error:
        gist = str(error).partition("\n")[0]
        raise InvalidInput.of(f"{prefix}config_groups", entry.get("config_groups"), f"valid ({gist})") from error
    schemes = {group: scheme for group, scheme in groups.items() if scheme.weights is not None}
    require(bool(schemes), f"{prefix}config_groups", list(groups), "groups of weights")
    formats = {group: str(scheme.format or entry.get("format")) for group, scheme in schemes.items()}
    for group, format_ in formats.items():
        require(
            format_ in _FORMATS, f"{prefix}config_groups.{group}.format", format_, f"one of {', '.join(_FORMATS)}"
        )

    def weight(path: str, layer: Layer) -> torch.Tensor:
        group = _group_of(prefix, path, schemes)
        return _unpack(path, layer, schemes[group], formats[group])

    bits = min(scheme.weights.num_bits for scheme in schemes.values())
    optional = {"weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx"}
    return Packing(frozenset({"weight_scale"}), frozenset(optional), 32 // bits, weight)


def _refuse_options(prefix: str, entry: Mapping[str, Any]) -> None:
    for key in _ABSENT:
        require(not entry.get(key), f"{prefix}{key}", entry.get(key), "absent: it is not unpacked")
    format_, status = entry.get("format"), entry.get("quantization_status")
    formats = (*_FORMATS, _MIXED_PRECISION)
    require(format_ in formats, f"{prefix}format", format_, f"one of {', '.join(formats)}")
    require(status == "compressed", f"{prefix}quantization_status", status, "'compressed'")
    groups = entry.get("config_groups")
    for group, scheme in (groups if isinstance(groups, Mapping) else {}).items():
        field = f"{prefix}config_groups.{group}."
        settings = scheme if isinstance(scheme, Mapping) else {}
        for key in _ABSENT_OF_GROUP:
            limit = "absent: activations keep their precision"
            require(settings.get(key) is None, f"{field}{key}", settings.get(key), limit)
        weights = settings.get("weights")
        order = weights.get("actorder") if isinstance(weights, Mapping) else None
        require(order in _ORDERS, f"{field}weights.actorder", order, "absent or 'weight'")


def _group_of(prefix: str, path: str, schemes: Mapping[str, Any]) -> str:
    """The group that a layer belongs to.

    Raises:
        InvalidInput: none of several, or more than one.
    """
    if len(schemes) == 1:
        return next(iter(schemes))
    import torch
    from compressed_tensors.utils.match import is_match

    layer = torch.nn.Linear(1, 1, device="meta")
    names = [group for group, scheme in schemes.items() if is_match(path, layer, scheme.targets)]
    require(len(names) == 1, f"{prefix}config_groups of layer {path}", names, "one group")
    return names[0]


def _unpack(path: str, layer: Layer, scheme: Any, format_: str) -> torch.Tensor:
    from compressed_tensors.compressors import BaseCompressor

    parts = {"weight_scale", *(("weight_packed", "weight_shape") if format_ == _PACK_QUANTIZED else ("weight",))}
    parts |= set() if scheme.weights.symmetric else {"weight_zero_point"}
    fits = parts <= set(layer) <= parts | {"weight_zero_point"}
    require(fits, f"layer {path}: tensors", sorted(layer), f"{', '.join(sorted(parts))} of {format_}")
    weight: torch.Tensor = BaseCompressor.get_value_from_registry(format_).decompress(dict(layer), scheme)["weight"]
    return weight


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
