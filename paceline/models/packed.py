"""Weights of few bits that other tools have packed into integers, and the floats that they stand for.

Layers are told from the names of their tensors, so what a tool left in floats stays as it is. Tensors keep the names
of the files: what the library makes of those, such as joining experts, it makes of the floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.models.resolve import ModelSource
from paceline.models.surplus import stored_tensors, weight_files
from paceline.protocol.errors import require

if TYPE_CHECKING:
    import torch

Layer = Mapping[str, "torch.Tensor"]
"""Tensors of one layer by the last part of their names."""
_WEIGHTS = "model.safetensors"
_PLAIN = "weight"
"""The tensor of a layer that isn't packed, beside its bias."""
_LISTED_LAYERS = 3


@dataclass(frozen=True)
class Packing:
    """A method's packing of a layer.

    Attributes:
        parts: last parts of the names of a packed layer's tensors.
        optional: further ones, which may lack.
        values: that an integer of 32 bits holds, at most.
        weight: path and tensors of a layer → its weight [outputs, inputs].
    """

    parts: frozenset[str]
    optional: frozenset[str]
    values: int
    weight: Callable[[str, Layer], torch.Tensor]


def unpack_tensors(source: ModelSource, packing: Packing, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Read every tensor of a model's files, packed layers as floats.

    Args:
        resolved: the model.
        packing: what is packed, and how.
        dtype: of the floats; None: of those that the files have.

    Raises:
        InvalidInput: parts of layers are missing, or of sizes that don't fit.
        SafetensorError: a file is damaged.
    """
    from safetensors import safe_open

    tensors: dict[str, torch.Tensor] = {}
    layers: dict[str, dict[str, torch.Tensor]] = {}
    own = packing.parts | packing.optional | {_PLAIN}
    files = weight_files(source, _WEIGHTS)
    require(bool(files), "model", source.name, f"one with {_WEIGHTS}, whole or in parts, as its weights are packed")
    for file in files:
        with safe_open(file, "pt") as reader:
            for name in reader.keys():  # noqa: SIM118  # no mapping
                path, _, part = name.rpartition(".")
                where = layers.setdefault(path, {}) if part in own else tensors
                where[part if part in own else name] = reader.get_tensor(name)
    incomplete = sorted(
        path for path, layer in layers.items() if set(layer) != {_PLAIN} and not packing.parts <= set(layer)
    )
    names, parts = ", ".join(incomplete[:_LISTED_LAYERS]), ", ".join(sorted(packing.parts))
    require(not incomplete, f"model {source.name}: packed layers", names, f"whole: {parts}")
    for path in list(layers):
        layer = layers.pop(path)
        weight = layer[_PLAIN] if set(layer) == {_PLAIN} else packing.weight(path, layer)
        tensors[f"{path}.{_PLAIN}"] = weight if dtype is None else weight.to(dtype)
    return tensors


def unpacked_bytes(source: ModelSource, packing: Packing, item: int) -> int:
    """The bytes of a model's floats, at most.

    `item`: bytes of one.
    """
    tensors = stored_tensors(source).values()
    values = sum(math.prod(each.shape) * (packing.values if each.dtype == "I32" else 1) for each in tensors)
    return values * item


def integers_of(words: torch.Tensor, bits: int) -> torch.Tensor:
    """[..., n] words of 32 bits → [..., n · 32 / bits] integers of few bits, the lowest first."""
    import torch

    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words[..., None] >> shifts & (1 << bits) - 1).flatten(-2)


def group_of(path: str, inputs: int, groups: int, group_size: int) -> torch.Tensor:
    """The group of each input [inputs]; a group size of -1 is one group.

    Raises:
        InvalidInput: there are more or fewer groups than the size says.
    """
    import torch

    size = inputs if group_size == -1 else group_size
    group_count = -(-inputs // size)
    require(
        groups == group_count, f"layer {path}: groups", groups, f"{group_count}, of {inputs} inputs by {group_size}"
    )
    return torch.arange(inputs) // size


def awq(group_size: int) -> Packing:
    """AutoAWQ's files for products of matrices (gemm): four bits, [inputs, outputs], a zero for each group."""

    def weight(path: str, layer: Layer) -> torch.Tensor:
        values, zeros = (integers_of(layer[part], 4) for part in ("qweight", "qzeros"))
        # An integer holds eight neighbours, the even ones first.
        values, zeros = (part.unflatten(-1, (-1, 8))[..., _AWQ_ORDER].flatten(-2) for part in (values, zeros))
        group = group_of(path, len(values), len(zeros), group_size)
        return _scale(values, zeros, layer["scales"], group)

    return Packing(frozenset({"qweight", "qzeros", "scales"}), frozenset(), 8, weight)


def gptq(bits: int, group_size: int, *, zeros_less_one: bool) -> Packing:
    """Files of AutoGPTQ and of its successors: [inputs, outputs], inputs of a group wherever `g_idx` says.

    `zeros_less_one`: the older format, which keeps each zero less one.
    """

    def weight(path: str, layer: Layer) -> torch.Tensor:
        values = integers_of(layer["qweight"].T, bits).T
        zeros = integers_of(layer["qzeros"], bits)[:, : values.shape[1]]  # the last integer may be padded
        zeros = _one_more(path, zeros, bits) if zeros_less_one else zeros
        group = _gptq_group(path, layer, len(values), len(zeros), group_size)
        return _scale(values, zeros, layer["scales"], group)

    return Packing(frozenset({"qweight", "qzeros", "scales"}), frozenset({"g_idx"}), 32 // bits, weight)


def _one_more(path: str, zeros: torch.Tensor, bits: int) -> torch.Tensor:
    """The zeros of the older format, each of which is stored less one.

    Raises:
        InvalidInput: one of them was 0; tools differ in what became of its neighbours.
    """
    most = (1 << bits) - 1
    overflow = int((zeros == most).sum())
    limit = "0: the format can't hold them, and its readers differ (save it with checkpoint_format gptq_v2)"
    require(overflow == 0, f"layer {path}: count of zeros that are 0 in checkpoint_format gptq", overflow, limit)
    return zeros + 1


def _gptq_group(path: str, layer: Layer, inputs: int, groups: int, group_size: int) -> torch.Tensor:
    """The group of each input [inputs]."""
    import torch

    regular = group_of(path, inputs, groups, group_size)
    g_idx = layer.get("g_idx")
    if g_idx is None or g_idx.numel() == 0:
        return regular
    group = g_idx.long()
    fits = group.shape == (inputs,) and int(group.min()) >= 0 and int(group.max()) < groups
    even = fits and torch.equal(group.bincount(minlength=groups), regular.bincount(minlength=groups))
    require(even, f"layer {path}: g_idx", group.tolist()[:8], f"{group_size} inputs of each of {groups} groups")
    return group


def _scale(values: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Integers [inputs, outputs], zeros and scales [groups, outputs] → the weight [outputs, inputs]."""
    weight: torch.Tensor = (values - zeros[group]) * scales.float()[group]
    return weight.T.contiguous()


_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place of each of eight neighbours."""
