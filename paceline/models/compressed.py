"""Weights as llm-compressor writes them, which the library compressed-tensors unpacks into floats.

A `config.json` groups layers by what their weights are: whole numbers packed into integers, or numbers of eight bits,
each with scales. The floats are the library's own, in the precision of the scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from paceline.models.packed import Layer, Packing
from paceline.protocol.errors import InvalidInput, require

if TYPE_CHECKING:
    import torch

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
