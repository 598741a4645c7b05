"""Products of few rows with weights laid out for them, compiled for CPUs with vectors of 512 bits.

A step of few rows is as fast as its weights can be read. They lie in panels of sixteen outputs, input by input, so
that one vector of weights is read once for all rows and every row's sum stays in a register. A sum runs over its
inputs in order whatever rows are beside it, so a row's numbers are bit-identical in any step. Weights may be kept as
integers of eight bits, each output with a scale of its own, which is a quarter of the bytes; inputs and sums are
float32.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from paceline.engine.cpu.row_math import ITEM, floats
from paceline.engine.cpu.thread_pool import ThreadPool, finish, phases, take, wait
from paceline.engine.cpu.tiles import BYTE, LANES, MOST_ROWS, PANELS, Tile, tile
from paceline.runtime.compiled import compiled, compiled_pointer

PIECE = PANELS * LANES
"""Most outputs of a piece."""
WEIGHT_DTYPES = (torch.float32, torch.int8)
"""The dtypes that weights may be stored in."""
_LARGEST = 127
"""The integer of each output's largest weight."""
HUGE_PAGE = 2 << 20
"""Bytes of a large page on x86-64."""


def has_wide_vectors() -> bool:
    """Whether this CPU has the instructions that the products are laid out for."""
    try:
        return bool(binding.get_host_cpu_features().get("avx512f", False))
    except RuntimeError:  # LLVM can't tell what this CPU has
        return False


@compiled
def pieces(outputs: int) -> int:
    """Pieces of a product with so many outputs: the last are small, so that threads end together."""
    panels = outputs // LANES
    return (panels - 1) // PANELS + (1 if panels % PANELS == 1 else 2)


@compiled
def panels_of(piece: int, outputs: int) -> tuple[int, int]:
    """The first panel of a piece, and how many it has."""
    panels = outputs // LANES
    whole = (panels - 1) // PANELS
    if piece < whole:
        return piece * PANELS, PANELS
    rest = panels - whole * PANELS
    half = (rest + 1) // 2
    return (whole * PANELS, half) if piece == whole else (whole * PANELS + half, rest - half)


def padded_outputs(outputs: int) -> int:
    """The number of outputs, rounded up to whole panels."""
    return -(-outputs // LANES) * LANES


@compiled
def panel_bytes(depth: int, item: int) -> int:
    """In compiled code: bytes of a panel whose weights have `item` each, and of its scales."""
    return depth * LANES * item + (LANES * ITEM if item == BYTE else 0)


def in_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A float32 matrix as symmetric integers of eight bits, and the scale [outputs, 1] of each output."""
    scales = weight.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / _LARGEST
    return (weight / scales).round().to(torch.int8), scales


def _panel_layout(weight: torch.Tensor) -> torch.Tensor:
    """[outputs, inputs] → [panels, inputs, LANES]."""
    return weight.view(-1, LANES, weight.shape[1]).transpose(1, 2).contiguous()


def _int8_panels(weight: torch.Tensor) -> torch.Tensor:
    """[outputs, inputs] → [panels, (inputs + ITEM) · LANES] bytes: integers, then the scales of the outputs."""
    integers, scales = in_int8(weight)
    return torch.cat([_panel_layout(integers).flatten(1), scales.view(-1, LANES).view(torch.int8)], dim=1)


def _in_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that takes few entries of the processor's page tables, where the system has large pages to give."""
    pages = mmap.mmap(-1, tensor.nbytes + HUGE_PAGE)
    with suppress(OSError, AttributeError):  # none to give, or no Linux
        pages.madvise(mmap.MADV_HUGEPAGE)
    room = torch.frombuffer(pages, dtype=torch.uint8)
    start = -room.data_ptr() % HUGE_PAGE
    copy = room[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


class Kernel(NamedTuple):
    """A reader of weights, in compiled code: the address of `_multiply`, and the bytes of a weight."""

    address: int
    item: int


class PanelLinear(torch.nn.Module):
    """`nn.Linear` for inference on a CPU; its input and output are float32.

    Args:
        linear: what it computes.
        pool: the threads that compute.
        dtype: of the stored weights, one of `WEIGHT_DTYPES`.
    """

    def __init__(self, linear: torch.nn.Linear, pool: ThreadPool, dtype: torch.dtype) -> None:
        super().__init__()
        assert dtype in WEIGHT_DTYPES and linear.weight.dtype == torch.float32
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        full = weight.new_zeros((padded_outputs(self.out_features), self.in_features))
        full[: self.out_features] = weight
        self.panels = _in_huge_pages(_panel_layout(full) if dtype == torch.float32 else _int8_panels(full))
        """[panels, in_features, LANES], or as `_int8_panels` says."""
        self.bias: torch.Tensor | None = None
        if linear.bias is not None:
            self.bias = full.new_zeros(full.shape[0])
            self.bias[: self.out_features] = linear.bias.detach()
        self.kernel = Kernel(_multiply_address(), dtype.itemsize)
        self._pool = pool

    @property
    def addresses(self) -> tuple[int, int]:
        """Addresses of the weights and of the bias, 0 without a bias."""
        return self.panels.data_ptr(), 0 if self.bias is None else self.bias.data_ptr()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] → [..., out_features]."""
        inputs = rows.reshape(-1, self.in_features).contiguous()
        count, outputs = len(inputs), padded_outputs(self.out_features)
        out = inputs.new_empty((count, outputs))
        counters = phases(1)
        source, destination = (inputs.data_ptr(), count, self.in_features), (out.data_ptr(), outputs)

        # A late helper still reads the counters, so its job keeps a reference to them.
        def work(_: int) -> None:
            product(counters, 0, self.kernel, self.addresses, source, destination, False)

        self._pool.run(work)
        return out[:, : self.out_features].view(*rows.shape[:-1], self.out_features)


def _multiply(
    item: int, weights: int, depth: int, inputs: int, input_step: int, out: int, out_step: int, rows: int, panels: int
) -> None:
    """out[rows, panels] += inputs · weights, for any number of rows and as many panels as a piece has."""
    step = panel_bytes(depth, item)
    start = 0
    while start < rows:
        remaining = rows - start
        groups = (remaining + MOST_ROWS - 1) // MOST_ROWS
        count = (remaining + groups - 1) // groups  # even groups: a single row costs as much as two
        wide = panels if panels < PANELS or count <= MOST_ROWS // 2 else PANELS // 2
        x, y = inputs + start * input_step, out + start * out_step
        for panel in range(0, panels, wide):
            panel_weights, panel_out = weights + panel * step, y + panel * LANES * ITEM
            tile(count, wide, item, panel_weights, depth, x, input_step, panel_out, out_step)
        start += count


@cache
def _multiply_address() -> int:
    return compiled_pointer(_multiply, 9)


def _emit_call(
    typing: Any,
    address: Any,
    item: Any,
    weights: Any,
    depth: Any,
    inputs: Any,
    input_step: Any,
    out: Any,
    out_step: Any,
    rows: Any,
    panels: Any,
) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [Tile.WORD] * 9)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10), generate


multiply: Any = intrinsic(_emit_call)
"""In compiled code: call `_multiply` by its address, so that it is compiled once and not into every caller."""


@partial(compiled, inline=True)
def begin(out: int, out_step: int, bias: int, rows: int, columns: int) -> None:
    """In compiled code: set the sums of a product to its bias, or to zero where the bias's address is 0."""
    for row in range(rows):
        sums, biases = floats(out + row * out_step), floats(bias)
        for column in range(columns):
            sums[column] = biases[column] if bias else np.float32(0)


@compiled
def multiply_piece(
    piece: int,
    kernel: Kernel,
    addresses: tuple[int, int],
    source: tuple[int, int, int],
    destination: tuple[int, int],
    adds: bool,
) -> None:
    """In compiled code: one piece of out = inputs · weights + bias, or of out += inputs · weights.

    Args:
        piece: which one, of `pieces(outputs)`.
        kernel: how weights are read.
        addresses: of the panels, and of the bias or 0.
        source: address of [rows, depth], rows and depth.
        destination: address of [rows, outputs], and outputs, whole panels of them.
        adds: whether to add to what `out` holds, without a bias.
    """
    (weights, bias), (inputs, rows, depth), (out, outputs) = addresses, source, destination
    first, count = panels_of(piece, outputs)
    column = first * LANES * ITEM
    if not adds:
        begin(out + column, outputs * ITEM, bias + column if bias else 0, rows, count * LANES)
    panel_weights, step = weights + first * panel_bytes(depth, kernel.item), outputs * ITEM
    multiply(kernel.address, kernel.item, panel_weights, depth, inputs, depth * ITEM, out + column, step, rows, count)


@compiled
def product(
    counters: NDArray[np.int64],
    phase: int,
    kernel: Kernel,
    addresses: tuple[int, int],
    source: tuple[int, int, int],
    destination: tuple[int, int],
    adds: bool,
) -> None:
    """In compiled code: a whole product, as one phase; arguments as for `multiply_piece`."""
    last = pieces(destination[1])
    piece = take(counters, phase)
    while piece < last:
        multiply_piece(piece, kernel, addresses, source, destination, adds)
        finish(counters, phase)
        piece = take(counters, phase)
    wait(counters, phase, last)
