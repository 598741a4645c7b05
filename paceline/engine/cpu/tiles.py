"""Machine code of the tiles of a product: a loop over the inputs with every sum in a register."""

from __future__ import annotations

import itertools
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from paceline.engine.cpu.row_math import ITEM

LANES = 16
"""Outputs of a panel: float32 numbers of one vector."""
PANELS = 4
"""Panels that are multiplied together, in a piece of a phase: four streams of weights are read faster than two.

Measured for docs/decisions/2026-11-21-a-step-in-one-loop.md.
"""
MOST_ROWS = 12
"""Rows whose sums with two panels fit in the 32 registers, or half as many with four."""
BYTE = 1
"""Bytes of a weight that is kept as an integer."""
_declare: Any = cgutils.get_or_insert_function
_PREFETCH_BYTES = 2048
"""Bytes ahead at which weights are prefetched; chosen, no measurement is recorded. It decides speed alone."""


def _emit_tile(
    typing: Any,
    rows: Any,
    panels: Any,
    item: Any,
    weights: Any,
    depth: Any,
    inputs: Any,
    input_step: Any,
    out: Any,
    out_step: Any,
) -> Any:
    """out[row, panel] += inputs[row] · weights[panel], for rows and panels of one of `_TILES`.

    Addresses; steps from row to row in bytes; `depth` is the number of inputs, `item` the bytes of a weight.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word, number = Tile.word, arguments[0]
        for further in arguments[1:3]:
            number = builder.add(builder.mul(number, word(_BASE)), further)
        exit_block = builder.append_basic_block()
        choice = builder.switch(number, exit_block)
        for (rows, panels), item in itertools.product(_TILES, (BYTE, ITEM)):
            block = builder.append_basic_block()
            choice.add_case(word((rows * _BASE + panels) * _BASE + item), block)
            builder.position_at_end(block)
            Tile(builder, rows, panels, item).build(*arguments[3:])
            builder.branch(exit_block)
        builder.position_at_end(exit_block)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), generate


tile: Any = intrinsic(_emit_tile)
_TILES = (
    *itertools.product(range(1, MOST_ROWS // 2 + 1), (1, 2, PANELS)),
    *itertools.product(range(MOST_ROWS // 2 + 1, MOST_ROWS + 1), (1, 2)),
)
"""Rows and panels of the tiles there are."""
_BASE = 8
"""More than any number of panels or bytes, so that every tile has a number of its own."""


class Tile:
    """The machine code of one tile: a loop over the inputs, with every sum in a register of its own."""

    WORD = ir.IntType(64)
    VECTOR = ir.VectorType(ir.FloatType(), LANES)
    WORDS = ir.VectorType(ir.IntType(32), LANES)
    BYTES = ir.VectorType(ir.IntType(8), LANES)

    def __init__(self, builder: Any, rows: int, panels: int, item: int) -> None:
        self._builder, self._rows, self._panels, self._item = builder, rows, panels, item

    def build(self, weights: Any, depth: Any, inputs: Any, input_step: Any, out: Any, out_step: Any) -> None:
        """Emit the loop, and the additions to `out` behind it."""
        builder, word = self._builder, self.word
        entry, loop, exit_block = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.branch(loop)
        builder.position_at_end(loop)
        index = builder.phi(self.WORD)
        sums = [[builder.phi(self.VECTOR) for _ in range(self._panels)] for _ in range(self._rows)]
        length = builder.mul(depth, word(LANES * self._item))
        panel_step = length if self._item == ITEM else builder.add(length, word(LANES * ITEM))
        start = builder.add(weights, builder.mul(index, word(LANES * self._item)))
        vectors = [self._weights(self._step(start, panel_step, panel)) for panel in range(self._panels)]
        start = builder.add(inputs, builder.mul(index, word(ITEM)))
        totals = []
        for row, row_sums in enumerate(sums):
            broadcast = self._broadcast(self._step(start, input_step, row))
            pairs = zip(vectors, row_sums, strict=True)
            totals.append([self._multiply_add(vector, broadcast, old) for vector, old in pairs])
        following = builder.add(index, word(1))
        for phi, first, later in ((index, word(0), following), *self._phi_inputs(sums, totals)):
            phi.add_incoming(first, entry)
            phi.add_incoming(later, loop)
        builder.cbranch(builder.icmp_signed("<", following, depth), loop, exit_block)
        builder.position_at_end(exit_block)
        if self._item == BYTE:
            scales = [self._step(builder.add(weights, length), panel_step, panel) for panel in range(self._panels)]
            totals = [self._scale(row_sums, scales) for row_sums in totals]
        for row, row_sums in enumerate(totals):
            for panel, total in enumerate(row_sums):
                self._add(builder.add(self._step(out, out_step, row), word(panel * LANES * ITEM)), total)

    @classmethod
    def word(cls, value: int) -> Any:
        """A constant."""
        return ir.Constant(cls.WORD, value)

    def _step(self, start: Any, size: Any, count: int) -> Any:
        return self._builder.add(start, self._builder.mul(size, self.word(count)))

    def _phi_inputs(self, sums: Any, totals: Any) -> list[tuple[Any, Any, Any]]:
        zero = ir.Constant(self.VECTOR, [0.0] * LANES)
        return [
            (old, zero, new)
            for olds, news in zip(sums, totals, strict=True)
            for old, new in zip(olds, news, strict=True)
        ]

    def _weights(self, address: Any) -> Any:
        builder = self._builder
        self._ask_for(builder.add(address, self.word(_PREFETCH_BYTES)))
        if self._item == ITEM:
            return builder.load(builder.inttoptr(address, self.VECTOR.as_pointer()), align=LANES * ITEM)
        integers = builder.load(builder.inttoptr(address, self.BYTES.as_pointer()), align=LANES)
        return builder.sitofp(builder.sext(integers, self.WORDS), self.VECTOR)

    def _scale(self, totals: Any, scales: Any) -> list[Any]:
        builder, kind = self._builder, self.VECTOR.as_pointer()
        factors = [builder.load(builder.inttoptr(address, kind), align=ITEM) for address in scales]
        return [builder.fmul(total, scale) for total, scale in zip(totals, factors, strict=True)]

    def _ask_for(self, address: Any) -> None:
        byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
        prefetch = _declare(self._builder.module, kind, "llvm.prefetch.p0")
        rw, locality, cache = ir.Constant(flag, 0), ir.Constant(flag, 3), ir.Constant(flag, 1)
        self._builder.call(prefetch, [self._builder.inttoptr(address, byte), rw, locality, cache])

    def _broadcast(self, address: Any) -> Any:
        builder, nothing = self._builder, ir.Constant(self.VECTOR, ir.Undefined)
        number = builder.load(builder.inttoptr(address, ir.FloatType().as_pointer()), align=ITEM)
        first = builder.insert_element(nothing, number, ir.Constant(ir.IntType(32), 0))
        return builder.shuffle_vector(first, nothing, ir.Constant(self.WORDS, [0] * LANES))

    def _multiply_add(self, weights: Any, broadcast: Any, total: Any) -> Any:
        kind = ir.FunctionType(self.VECTOR, [self.VECTOR] * 3)
        fma = _declare(self._builder.module, kind, f"llvm.fma.v{LANES}f32")
        return self._builder.call(fma, [weights, broadcast, total])

    def _add(self, address: Any, total: Any) -> None:
        place = self._builder.inttoptr(address, self.VECTOR.as_pointer())
        old = self._builder.load(place, align=ITEM)
        self._builder.store(self._builder.fadd(total, old), place, align=ITEM)
