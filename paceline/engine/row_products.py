"""Products of few rows with weights laid out for them, compiled for CPUs with vectors of 512 bits.

A step of few rows is as fast as its weights can be read. They lie in panels of
sixteen outputs, input by input, so that one vector of weights is read once for
all rows and every row's sum stays in a register. A sum runs over its inputs in
order whatever rows are beside it, so a row's numbers are the same bits in any
step. Weights may be kept as integers of eight bits, each output with a scale of
its own, which is a quarter of the bytes; inputs and sums are float32.
"""

from __future__ import annotations

import itertools
import mmap
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from paceline.compiled import compiled, compiled_pointer
from paceline.engine.crew import Crew, finish, phases, take, wait
from paceline.engine.row_math import ITEM, floats

LANES = 16
"""Outputs of a panel: float32 numbers of one vector."""
PANELS = 4
"""Panels that are multiplied together, in a piece of a phase: more streams of weights are read faster."""
PIECE = PANELS * LANES
"""Most outputs of a piece."""
MOST_ROWS = 12
"""Rows whose sums with two panels fit in the registers; of half as many, with four."""
STORED = (torch.float32, torch.int8)
"""What weights may be kept in."""
_BYTE = 1
"""Bytes of a weight that is kept as an integer."""
_LARGEST = 127
_declared: Any = cgutils.get_or_insert_function
HUGE_PAGE = 2 << 20
_AHEAD = 2048
"""Bytes that the weights are asked for before they are needed."""


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


def padded(outputs: int) -> int:
    """Outputs with those that fill up the last panel."""
    return -(-outputs // LANES) * LANES


@compiled
def panel_bytes(depth: int, item: int) -> int:
    """In compiled code: bytes of a panel whose weights have `item` each, and of its scales."""
    return depth * LANES * item + (LANES * ITEM if item == _BYTE else 0)


def _laid_out(weight: torch.Tensor) -> torch.Tensor:
    """[outputs, inputs] → [panels, inputs, LANES]."""
    return weight.view(-1, LANES, weight.shape[1]).transpose(1, 2).contiguous()


def _rounded(weight: torch.Tensor) -> torch.Tensor:
    """[outputs, inputs] → [panels, (inputs + ITEM) · LANES] bytes: integers, then the scales of the outputs."""
    scales = weight.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / _LARGEST
    integers = _laid_out((weight / scales[:, None]).round()).to(torch.int8).flatten(1)
    return torch.cat([integers, scales.view(-1, LANES).view(torch.int8)], dim=1)


def _in_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that takes few entries of the processor's page tables, where the system has large pages to give."""
    held = mmap.mmap(-1, tensor.nbytes + HUGE_PAGE)
    with suppress(OSError, AttributeError):  # none to give, or no Linux
        held.madvise(mmap.MADV_HUGEPAGE)
    room = torch.frombuffer(held, dtype=torch.uint8)
    start = -room.data_ptr() % HUGE_PAGE
    copy = room[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


class Kernel(NamedTuple):
    """How weights are read, in compiled code: the address of `_multiply`, and the bytes of a weight."""

    address: int
    item: int


class PanelLinear(torch.nn.Module):
    """`nn.Linear` for inference on a CPU; its input and output are float32.

    Args:
        linear: what it computes.
        crew: the threads that compute.
        stored: what the weights are kept in.
    """

    def __init__(self, linear: torch.nn.Linear, crew: Crew, stored: torch.dtype) -> None:
        super().__init__()
        assert stored in STORED and linear.weight.dtype == torch.float32
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        full = weight.new_zeros((padded(self.out_features), self.in_features))
        full[: self.out_features] = weight
        self.panels = _in_huge_pages(_laid_out(full) if stored == torch.float32 else _rounded(full))
        """[panels, in_features, LANES], or as `_rounded` says."""
        self.bias: torch.Tensor | None = None
        if linear.bias is not None:
            self.bias = full.new_zeros(full.shape[0])
            self.bias[: self.out_features] = linear.bias.detach()
        self.kernel = Kernel(_multiply_address(), stored.itemsize)
        self._crew = crew

    @property
    def addresses(self) -> tuple[int, int]:
        """Of the weights and of the bias, 0 without one."""
        return self.panels.data_ptr(), 0 if self.bias is None else self.bias.data_ptr()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] → [..., out_features]."""
        given = rows.reshape(-1, self.in_features).contiguous()
        count, outputs = len(given), padded(self.out_features)
        out = given.new_empty((count, outputs))
        counters = phases(1)
        read, written = (given.data_ptr(), count, self.in_features), (out.data_ptr(), outputs)

        # A helper that is late still looks at the counters, so its job holds them.
        def work(_: int) -> None:
            _product(counters, self.kernel, self.addresses, read, written)

        self._crew.run(work)
        return out[:, : self.out_features].view(*rows.shape[:-1], self.out_features)


def _tiled(
    typing: Any,
    rows: Any,
    panels: Any,
    item: Any,
    weights: Any,
    depth: Any,
    given: Any,
    given_step: Any,
    out: Any,
    out_step: Any,
) -> Any:
    """out[row, panel] += given[row] · weights[panel], for rows and panels of one of `_TILES`.

    Addresses; steps from row to row in bytes; `depth` is the number of inputs, `item` the bytes of a weight.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word, number = _Tile.word, arguments[0]
        for further in arguments[1:3]:
            number = builder.add(builder.mul(number, word(_BASE)), further)
        behind = builder.append_basic_block()
        choice = builder.switch(number, behind)
        for (rows, panels), item in itertools.product(_TILES, (_BYTE, ITEM)):
            block = builder.append_basic_block()
            choice.add_case(word((rows * _BASE + panels) * _BASE + item), block)
            builder.position_at_end(block)
            _Tile(builder, rows, panels, item).build(*arguments[3:])
            builder.branch(behind)
        builder.position_at_end(behind)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), generate


_tile: Any = intrinsic(_tiled)
_TILES = (
    *itertools.product(range(1, MOST_ROWS // 2 + 1), (1, 2, PANELS)),
    *itertools.product(range(MOST_ROWS // 2 + 1, MOST_ROWS + 1), (1, 2)),
)
"""Rows and panels of the tiles there are."""
_BASE = 8
"""More than any number of panels or bytes, so that every tile has a number of its own."""


class _Tile:
    """The machine code of one tile: a loop over the inputs, with every sum in a register of its own."""

    WORD = ir.IntType(64)
    VECTOR = ir.VectorType(ir.FloatType(), LANES)
    WORDS = ir.VectorType(ir.IntType(32), LANES)
    BYTES = ir.VectorType(ir.IntType(8), LANES)

    def __init__(self, builder: Any, rows: int, panels: int, item: int) -> None:
        self._builder, self._rows, self._panels, self._item = builder, rows, panels, item

    def build(self, weights: Any, depth: Any, given: Any, given_step: Any, out: Any, out_step: Any) -> None:
        builder, word = self._builder, self.word
        before, loop, behind = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.branch(loop)
        builder.position_at_end(loop)
        index = builder.phi(self.WORD)
        sums = [[builder.phi(self.VECTOR) for _ in range(self._panels)] for _ in range(self._rows)]
        length = builder.mul(depth, word(LANES * self._item))
        panel_step = length if self._item == ITEM else builder.add(length, word(LANES * ITEM))
        start = builder.add(weights, builder.mul(index, word(LANES * self._item)))
        vectors = [self._weights(self._step(start, panel_step, panel)) for panel in range(self._panels)]
        start = builder.add(given, builder.mul(index, word(ITEM)))
        totals = []
        for row, of_row in enumerate(sums):
            spread = self._spread(self._step(start, given_step, row))
            totals.append([self._fused(each, spread, old) for each, old in zip(vectors, of_row, strict=True)])
        following = builder.add(index, word(1))
        for phi, first, later in ((index, word(0), following), *self._carried(sums, totals)):
            phi.add_incoming(first, before)
            phi.add_incoming(later, loop)
        builder.cbranch(builder.icmp_signed("<", following, depth), loop, behind)
        builder.position_at_end(behind)
        if self._item == _BYTE:
            scales = [self._step(builder.add(weights, length), panel_step, panel) for panel in range(self._panels)]
            totals = [self._scaled(of_row, scales) for of_row in totals]
        for row, of_row in enumerate(totals):
            for panel, total in enumerate(of_row):
                self._add(builder.add(self._step(out, out_step, row), word(panel * LANES * ITEM)), total)

    @classmethod
    def word(cls, value: int) -> Any:
        """A constant."""
        return ir.Constant(cls.WORD, value)

    def _step(self, start: Any, size: Any, count: int) -> Any:
        return self._builder.add(start, self._builder.mul(size, self.word(count)))

    def _carried(self, sums: Any, totals: Any) -> list[tuple[Any, Any, Any]]:
        zero = ir.Constant(self.VECTOR, [0.0] * LANES)
        return [
            (old, zero, new)
            for olds, news in zip(sums, totals, strict=True)
            for old, new in zip(olds, news, strict=True)
        ]

    def _weights(self, address: Any) -> Any:
        builder = self._builder
        self._ask_for(builder.add(address, self.word(_AHEAD)))
        if self._item == ITEM:
            return builder.load(builder.inttoptr(address, self.VECTOR.as_pointer()), align=LANES * ITEM)
        found = builder.load(builder.inttoptr(address, self.BYTES.as_pointer()), align=LANES)
        return builder.sitofp(builder.sext(found, self.WORDS), self.VECTOR)

    def _scaled(self, totals: Any, scales: Any) -> list[Any]:
        builder, kind = self._builder, self.VECTOR.as_pointer()
        loaded = [builder.load(builder.inttoptr(address, kind), align=ITEM) for address in scales]
        return [builder.fmul(total, scale) for total, scale in zip(totals, loaded, strict=True)]

    def _ask_for(self, address: Any) -> None:
        byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
        prefetch = _declared(self._builder.module, kind, "llvm.prefetch.p0")
        read, keep, data = ir.Constant(flag, 0), ir.Constant(flag, 3), ir.Constant(flag, 1)
        self._builder.call(prefetch, [self._builder.inttoptr(address, byte), read, keep, data])

    def _spread(self, address: Any) -> Any:
        builder, nothing = self._builder, ir.Constant(self.VECTOR, ir.Undefined)
        number = builder.load(builder.inttoptr(address, ir.FloatType().as_pointer()), align=ITEM)
        first = builder.insert_element(nothing, number, ir.Constant(ir.IntType(32), 0))
        return builder.shuffle_vector(first, nothing, ir.Constant(self.WORDS, [0] * LANES))

    def _fused(self, weights: Any, spread: Any, total: Any) -> Any:
        kind = ir.FunctionType(self.VECTOR, [self.VECTOR] * 3)
        multiply_add = _declared(self._builder.module, kind, f"llvm.fma.v{LANES}f32")
        return self._builder.call(multiply_add, [weights, spread, total])

    def _add(self, address: Any, total: Any) -> None:
        place = self._builder.inttoptr(address, self.VECTOR.as_pointer())
        before = self._builder.load(place, align=ITEM)
        self._builder.store(self._builder.fadd(total, before), place, align=ITEM)


def _multiply(
    item: int, weights: int, depth: int, given: int, given_step: int, out: int, out_step: int, rows: int, panels: int
) -> None:
    """out[rows, panels] += given · weights, for any number of rows and as many panels as a piece has."""
    step = panel_bytes(depth, item)
    start = 0
    while start < rows:
        left = rows - start
        groups = (left + MOST_ROWS - 1) // MOST_ROWS
        count = (left + groups - 1) // groups  # even groups: a single row costs as much as two
        wide = panels if panels < PANELS or count <= MOST_ROWS // 2 else PANELS // 2
        x, y = given + start * given_step, out + start * out_step
        for panel in range(0, panels, wide):
            own, into = weights + panel * step, y + panel * LANES * ITEM
            _tile(count, wide, item, own, depth, x, given_step, into, out_step)
        start += count


@cache
def _multiply_address() -> int:
    return compiled_pointer(_multiply, 9)


def _called(
    typing: Any,
    address: Any,
    item: Any,
    weights: Any,
    depth: Any,
    given: Any,
    given_step: Any,
    out: Any,
    out_step: Any,
    rows: Any,
    panels: Any,
) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_Tile.WORD] * 9)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10), generate


multiply: Any = intrinsic(_called)
"""In compiled code: `_multiply` at an address, whose code is so compiled once and not into every caller."""


def _begin_at(out: int, out_step: int, bias: int, rows: int, columns: int) -> None:
    for row in range(rows):
        made, added = floats(out + row * out_step), floats(bias)
        for column in range(columns):
            made[column] = added[column] if bias else np.float32(0)


begin = compiled(_begin_at, inlined=True)
"""In compiled code: what a product is added to, its bias or, at address 0, nothing."""


@compiled
def multiply_piece(
    piece: int,
    kernel: Kernel,
    addresses: tuple[int, int],
    read: tuple[int, int, int],
    written: tuple[int, int],
    adds: bool,
) -> None:
    """In compiled code: one piece of out = given · weights + bias, or of out += given · weights.

    Args:
        piece: which one, of `pieces(outputs)`.
        kernel: how weights are read.
        addresses: of the panels, and of the bias or 0.
        read: address of [rows, depth], rows and depth.
        written: address of [rows, outputs], and outputs, as many as panels have.
        adds: whether to add to what is there, and no bias.
    """
    (weights, bias), (given, rows, depth), (out, outputs) = addresses, read, written
    first, count = panels_of(piece, outputs)
    column = first * LANES * ITEM
    if not adds:
        begin(out + column, outputs * ITEM, bias + column if bias else 0, rows, count * LANES)
    own, step = weights + first * panel_bytes(depth, kernel.item), outputs * ITEM
    multiply(kernel.address, kernel.item, own, depth, given, depth * ITEM, out + column, step, rows, count)


@compiled
def _product(
    counters: NDArray[np.int64],
    kernel: Kernel,
    addresses: tuple[int, int],
    read: tuple[int, int, int],
    written: tuple[int, int],
) -> None:
    """A whole product, the one phase of its run."""
    last = pieces(written[1])
    piece = take(counters, 0)
    while piece < last:
        multiply_piece(piece, kernel, addresses, read, written, False)
        finish(counters, 0)
        piece = take(counters, 0)
    wait(counters, 0, last)
