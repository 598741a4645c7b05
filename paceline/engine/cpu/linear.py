"""Linear layers with weights laid out once for few rows, on CPUs.

A verification step has a handful of rows. Torch's own product of so few rows
costs two to three times that of one row; with weights in oneDNN's blocked
layout two to eight rows cost about as much as one, which is what makes
verifying a proposal cheaper than decoding it. The packed layout replaces the
plain one (a tied embedding keeps its own copy).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn import functional

PACKED_FOR_ROWS = 8
"""Rows that oneDNN optimises the layout for; chosen, not tuned. It decides speed alone."""


def frozen_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.nn.Linear:
    """A layer of existing weights [outputs, inputs] and bias [outputs]; nothing is initialised first."""
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = torch.nn.Parameter(bias, requires_grad=False)
    return linear


class PackedLinear(torch.nn.Module):
    """`nn.Linear` for inference on a CPU, in float32 or bfloat16."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        weight = linear.weight.detach()
        self._weight: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] → [..., out_features]."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return product


class SummedLinear(torch.nn.Module):
    """A layer split over its inputs between ranks: adds up every rank's product, then adds the bias.

    Args:
        linear: the rank's part, which is taken over; its bias is the whole layer's.
        total: adds up a tensor over all ranks, in place.
    """

    def __init__(self, linear: torch.nn.Linear, total: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        # The bias must be added once, so the part that is multiplied has none.
        self.bias = linear.bias
        linear.register_parameter("bias", None)
        self.part = linear
        self._total = total

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., own inputs] → [..., outputs], the same on every rank."""
        product = self._total(self.part(rows))
        return product if self.bias is None else product + self.bias


def can_pack(model: torch.nn.Module) -> bool:
    """Whether this build and this model's device and dtype have packed products."""
    mkldnn: Any = torch.ops.mkldnn
    kinds = {(weight.device.type, weight.dtype) for weight in model.parameters()}
    has_operators = hasattr(mkldnn, "_reorder_linear_weight") and hasattr(mkldnn, "_linear_pointwise")
    packable = kinds == {("cpu", torch.float32)} or (kinds == {("cpu", torch.bfloat16)} and cpu_has_bfloat16())
    return bool(torch.backends.mkldnn.is_available()) and has_operators and packable


def cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 without converting it: half the bytes of float32, so half the time."""
    mkldnn: Any = torch.ops.mkldnn
    has_operator = torch.backends.mkldnn.is_available() and hasattr(mkldnn, "_is_mkldnn_bf16_supported")
    return has_operator and bool(mkldnn._is_mkldnn_bf16_supported())


@torch.inference_mode()
def pack_linears(
    model: torch.nn.Module,
    pack: Callable[[torch.nn.Linear], torch.nn.Module] = PackedLinear,
    exclude: Collection[str] = (),
) -> None:
    """Replace every plain `nn.Linear` of a model by what `pack` makes of it; those of one weight by one.

    Subclasses stay, and so do layers whose path is in `exclude`, which `outside_reads` yields.
    """
    # Layers themselves are not listed: each is freed as soon as it is replaced.
    parents = [each for each in model.named_modules() if type(each[1]) is not torch.nn.Linear]
    uses = Counter(_tensors(each) for each in model.modules() if type(each) is torch.nn.Linear)
    of_several: dict[tuple[int, int], torch.nn.Module] = {}
    for parent_path, parent in parents:
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear and path_pattern(f"{parent_path}.{name}") not in exclude:
                tensors = _tensors(child)
                layout = of_several.get(tensors) or pack(child)
                setattr(parent, name, layout)
                if uses[tensors] > 1:
                    of_several[tensors] = layout


def _tensors(linear: torch.nn.Linear) -> tuple[int, int]:
    return id(linear.weight), id(linear.bias)


def path_pattern(path: str) -> str:
    """A module's path, the same for all layers and experts."""
    return re.sub(r"\d+", "*", path.lstrip("."))


class _WatchedLinear(torch.nn.Linear):
    """A plain layer that notes when code other than its own forward pass reads its weights or bias."""

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias"):
            self._note()
        return super().__getattr__(name)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # as the base class calls it
        return functional.linear(input, self._parameters["weight"], self._parameters["bias"])  # type: ignore[arg-type]


@contextmanager
def outside_reads(model: torch.nn.Module) -> Iterator[set[str]]:
    """Note the plain layers whose weights or biases a model's code reads itself while it runs, as some routers do.

    Yields:
        Their paths as `path_pattern` writes them, so that what holds for one expert holds for all.
    """
    paths: set[str] = set()
    linears = [(path, each) for path, each in model.named_modules() if type(each) is torch.nn.Linear]
    for path, linear in linears:
        linear.__class__ = _WatchedLinear
        linear.__dict__["_note"] = partial(paths.add, path_pattern(path))
    try:
        yield paths
    finally:
        for _, linear in linears:
            linear.__class__ = torch.nn.Linear
            del linear.__dict__["_note"]
