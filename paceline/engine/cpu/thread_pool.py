"""Threads that share compiled work, piece by piece.

A step on a CPU has some two hundred phases of microseconds, each of which needs all of the one before. Library
thread pools take ten microseconds to start each. Here every thread runs the whole step, takes pieces of a phase from
a counter and spins until the last of them is done. A thread that the system has descheduled holds up its one piece
and no more (docs/decisions/2026-11-21-a-step-in-one-loop.md).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from paceline.runtime.compiled import compiled

Work = Callable[[int], None]
"""The function that each thread runs with its number; it must compute without the interpreter's lock."""

_declare: Any = cgutils.get_or_insert_function
_LINE = 64
"""Bytes of a cache line: counters that change apart lie apart."""
_PHASE = 2 * _LINE
_SPINS = 400
"""Looks before a waiting thread yields its core (docs/decisions/2026-11-21-a-step-in-one-loop.md)."""


class ThreadPool:
    """The calling thread and helpers, which sleep between jobs."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._helpers = ThreadPoolExecutor(max(threads - 1, 1), thread_name_prefix="compute")

    def run(self, work: Work) -> None:
        """Have every thread run `work`, whose pieces are taken from `phases`; returns when the caller's run does.

        A helper that comes late finds nothing left to take, so nobody waits for it.
        """
        for number in range(1, self.threads):
            self._helpers.submit(work, number)
        work(0)


def phases(count: int) -> NDArray[np.int64]:
    """Counters of so many phases; each run needs its own, since a late helper still looks at them."""
    return np.zeros((count, _PHASE // 8), np.int64)


def _emit_increment(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        counter = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(ir.IntType(64), 1), "acq_rel")

    return types.int64(types.int64), generate


def _emit_load(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()), "acquire", 8)

    return types.int64(types.int64), generate


def _emit_yield(typing: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        return builder.call(_declare(builder.module, kind, "sched_yield"), [])

    return types.int32(), generate


_increment: Any = intrinsic(_emit_increment)
_look: Any = intrinsic(_emit_load)
_yield_core: Any = intrinsic(_emit_yield)


@partial(compiled, inline=True)
def take(counters: NDArray[np.int64], phase: int) -> int:
    """In compiled code: the next piece of a phase; beyond its last, nothing is left."""
    return int(_increment(counters.ctypes.data + phase * _PHASE))


@partial(compiled, inline=True)
def finish(counters: NDArray[np.int64], phase: int) -> None:
    """In compiled code: count a piece as computed."""
    _increment(counters.ctypes.data + phase * _PHASE + _LINE)


@partial(compiled, inline=True)
def wait(counters: NDArray[np.int64], phase: int, pieces: int) -> None:
    """In compiled code: wait until all pieces of a phase are computed."""
    looks, counter = 0, counters.ctypes.data + phase * _PHASE + _LINE
    while _look(counter) < pieces:
        looks += 1
        if looks > _SPINS:
            _yield_core()
