"""Simulations side by side. Their time is virtual, so none is slower for what runs beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

Case = TypeVar("Case")
Result = TypeVar("Result")
Key = TypeVar("Key")


def on_all_cores(simulate: Callable[[Case], Result], cases: Iterable[Case]) -> list[Result]:
    """The results of all cases, in their order, by a process for each core."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as processes:
        return list(processes.map(simulate, cases))


def run_all(simulations: Mapping[Key, Callable[[], Result]]) -> dict[Key, Result]:
    """The results of simulations, by their keys."""
    return dict(zip(simulations, on_all_cores(_run, simulations.values()), strict=True))


def _run(simulation: Callable[[], Result]) -> Result:
    return simulation()
