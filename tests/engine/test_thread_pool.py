"""Compiled work in pieces: each is done once, whoever does it and however late a helper comes."""

from __future__ import annotations

import queue
import threading
from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.engine.cpu.thread_pool import ThreadPool, finish, phases, take, wait
from paceline.runtime.compiled import compiled

PIECES = 500
PHASES = 20


@compiled
def chained(counters: NDArray[np.int64], sums: NDArray[np.int64], done: NDArray[np.int64], thread: int) -> None:
    """Every piece adds up the whole phase before it, which must be complete by then."""
    for phase in range(1, PHASES):
        piece = take(counters, phase)
        while piece < PIECES:
            total = 0
            for other in range(PIECES):
                total += sums[phase - 1, other]
            sums[phase, piece] = total % 1009 + piece
            done[phase, piece] += 1 << (8 * thread)
            finish(counters, phase)
            piece = take(counters, phase)
        wait(counters, phase, PIECES)


def expected() -> NDArray[np.int64]:
    sums = np.zeros((PHASES, PIECES), np.int64)
    sums[0] = np.arange(PIECES)
    for phase in range(1, PHASES):
        sums[phase] = sums[phase - 1].sum() % 1009 + np.arange(PIECES)
    return sums


def run(pool: ThreadPool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    counters, sums, done = phases(PHASES), np.zeros((PHASES, PIECES), np.int64), np.zeros((PHASES, PIECES), np.int64)
    sums[0] = np.arange(PIECES)
    pool.run(lambda thread: chained(counters, sums, done, thread))
    return sums, done


@pytest.mark.parametrize("threads", [1, 3])
def test_every_piece_is_computed_once_and_phases_follow_one_another(threads: int) -> None:
    pool = ThreadPool(threads)
    for _ in range(20):
        sums, done = run(pool)
        np.testing.assert_array_equal(sums, expected())
        assert set(Counter(done[1:].ravel().tolist())) <= {1 << (8 * thread) for thread in range(threads)}


def test_a_helper_that_comes_late_is_not_waited_for_and_changes_nothing() -> None:
    pool, late = ThreadPool(2), threading.Event()
    pool._helpers.submit(late.wait)
    first, done = run(pool)
    assert done[1:].max() == 1, "the caller's own thread did every piece"
    late.set()
    second, _ = run(pool)
    np.testing.assert_array_equal(first, expected())
    np.testing.assert_array_equal(second, expected())


def test_a_pool_computes_with_all_of_its_threads() -> None:
    pool, numbers, together = ThreadPool(3), queue.SimpleQueue[int](), threading.Barrier(3)

    def work(number: int) -> None:
        numbers.put(number)
        together.wait(10)

    pool.run(work)
    assert sorted(numbers.get(timeout=10) for _ in range(3)) == [0, 1, 2]
    assert numbers.empty()
