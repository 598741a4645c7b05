"""What compiled rows save: the same steps through the library's operations and through compiled loops.

    python -m benchmarks.compiled_rows --out docs/reports

Every session holds 180 rows. The three ways take turns, six times, ten steps each: `library` attends and
normalises with torch, `attention` attends in compiled loops, `all` is what is served.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.reporting import markdown_table, write_report
from paceline.config import DEFAULT_MODEL, EngineSettings
from paceline.engine import fused, row_math
from paceline.engine.interface import StepItem, StepPlan
from paceline.engine.loading import load_engine
from paceline.engine.row_attention import FEW_KEYS
from paceline.engine.transformer import TransformerEngine

PREFIX = 180
TURNS = 6
STEPS = 10
WARM_UP = 3
SHAPES = ((1, 1), (1, 5), (1, 9), (4, 1), (8, 1), (16, 1), (32, 1))
"""Sessions of a step and rows of each."""
WAYS: dict[str, tuple[Any, int]] = {
    "library": (fused._LibraryMath, 0),
    "attention": (fused._LibraryMath, FEW_KEYS),
    "all": (row_math, FEW_KEYS),
}


@dataclass(frozen=True)
class Steps:
    """Median step of one shape, ms, by way."""

    threads: int
    sessions: int
    rows: int
    library_ms: float
    attention_ms: float
    all_ms: float


def use(engine: TransformerEngine, way: str) -> None:
    """Let the engine compute its next steps this way."""
    between, engine.few_keys = WAYS[way]
    for module in engine._model.modules():
        if isinstance(module, fused.FusedLayer):
            module._between = between


def measure(engine: TransformerEngine, threads: int, sessions: int, rows: int) -> Steps:
    """Interleaved steps of one shape."""
    for session in range(sessions):
        engine.open(session, PREFIX + rows)
        engine.step(StepPlan((StepItem(session, 0, tuple(range(PREFIX))),)))
    wanted = tuple(range(rows))
    plan = StepPlan(tuple(StepItem(session, PREFIX, wanted, logit_rows=wanted) for session in range(sessions)))
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(TURNS):
        for way in WAYS:
            use(engine, way)
            taken[way] += [_step_ms(engine, plan) for _ in range(WARM_UP + STEPS)][WARM_UP:]
    for session in range(sessions):
        engine.close(session)
    library, attention, every = (float(np.median(taken[way])) for way in WAYS)
    return Steps(threads, sessions, rows, library, attention, every)


def _step_ms(engine: TransformerEngine, plan: StepPlan) -> float:
    start = time.perf_counter_ns()
    engine.step(plan)
    return (time.perf_counter_ns() - start) / 1e6


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--out", type=Path, default=Path("docs/reports"))
    given = parser.parse_args()
    found: list[Steps] = []
    for threads in given.threads:
        torch.set_num_threads(threads)
        engine = load_engine(given.model, EngineSettings(threads=threads))
        if not isinstance(engine, TransformerEngine):
            raise SystemExit(f"{given.model}: not a model that computes compiled rows")
        found += [measure(engine, threads, *shape) for shape in SHAPES]
    settings = {"model": given.model, "precision": "float32", "rows held": str(PREFIX)}
    print(
        write_report(given.out, "compiled-rows", settings, found, markdown_table([asdict(steps) for steps in found]))
    )


if __name__ == "__main__":
    main()
