"""What compiled steps save: the same steps, layer by layer and as one compiled loop.

    python -m benchmarks.compiled_rows --out docs/reports

Every session holds 180 rows. The three ways take turns, six times, ten steps each: `packed` has the weights in
oneDNN's layout, as on CPUs without vectors of 512 bits, and what stands between products compiled; `panels`
has compiled products, called one by one; `step` is what is served.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.reporting import markdown_table, write_report
from paceline.config import DEFAULT_MODEL, EngineSettings
from paceline.engine import decoder
from paceline.engine.interface import StepItem, StepPlan
from paceline.engine.loading import load_engine
from paceline.engine.transformer import TransformerEngine

PREFIX = 180
TURNS = 6
STEPS = 10
WARM_UP = 3
SHAPES = ((1, 1), (1, 2), (1, 3), (1, 5), (1, 9), (1, 17), (4, 1), (8, 1), (16, 1), (32, 1))
"""Sessions of a step and rows of each."""
WAYS = ("packed", "panels", "step")


@dataclass(frozen=True)
class Steps:
    """Median step of one shape, ms, by way."""

    threads: int
    sessions: int
    rows: int
    packed_ms: float
    panels_ms: float
    step_ms: float


@dataclass(frozen=True)
class Engines:
    """The same model with weights in the library's layout, and in panels."""

    packed: TransformerEngine
    panels: TransformerEngine

    @classmethod
    def load(cls, model: str, settings: EngineSettings) -> Engines:
        """Load both."""
        with patch.object(decoder, "has_wide_vectors", return_value=False):
            packed = load_engine(model, settings)
        panels = load_engine(model, settings)
        if not isinstance(packed, TransformerEngine) or not isinstance(panels, TransformerEngine):
            raise SystemExit(f"{model}: not a model that computes compiled rows")
        if panels.row_decoder is None:
            raise SystemExit("neither this CPU nor this model has compiled steps")
        return cls(packed, panels)

    @contextmanager
    def way(self, name: str) -> Iterator[TransformerEngine]:
        """The engine that computes its steps this way."""
        if name == "packed":
            yield self.packed
            return
        held = self.panels.row_decoder
        self.panels.row_decoder = held if name == "step" else None
        yield self.panels
        self.panels.row_decoder = held


def measure(engines: Engines, threads: int, sessions: int, rows: int) -> Steps:
    """Interleaved steps of one shape."""
    both = (engines.packed, engines.panels)
    for engine, session in itertools.product(both, range(sessions)):
        engine.open(session, PREFIX + rows)
        engine.step(StepPlan((StepItem(session, 0, tuple(range(PREFIX))),)))
    wanted = tuple(range(rows))
    plan = StepPlan(tuple(StepItem(session, PREFIX, wanted, logit_rows=wanted) for session in range(sessions)))
    taken: dict[str, list[float]] = {name: [] for name in WAYS}
    for _, name in itertools.product(range(TURNS), WAYS):
        with engines.way(name) as engine:
            taken[name] += [_step_ms(engine, plan) for _ in range(WARM_UP + STEPS)][WARM_UP:]
    for engine, session in itertools.product(both, range(sessions)):
        engine.close(session)
    return Steps(threads, sessions, rows, *(float(np.median(taken[name])) for name in WAYS))


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
        engines = Engines.load(given.model, EngineSettings(threads=threads))
        found += [measure(engines, threads, *shape) for shape in SHAPES]
    settings = {"model": given.model, "precision": "float32", "rows held": str(PREFIX)}
    print(
        write_report(given.out, "compiled-rows", settings, found, markdown_table([asdict(steps) for steps in found]))
    )


if __name__ == "__main__":
    main()
