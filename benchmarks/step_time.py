"""What one step of a model costs by rows and threads, beside what reading its weights costs.

    python -m benchmarks.step_time --out docs/reports

A session holds 128 rows; each step computes some new ones and returns their logits (9 rows: a round of
k = 8). The floor is the time to read once, from memory, the weights that a step multiplies: every layer
and the head, the embedding's few rows left out. Its bandwidth is measured in the same run with the same
threads, before and after the steps: a float32 buffer as large as those weights is summed, multiplied
with itself (dot), and multiplied as a matrix with a vector, which is what a step of one row does; the
fastest median of all counts, so the floor is the lowest of those.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.peers.models import hf_folder
from benchmarks.reporting.environment import load_average
from benchmarks.reporting.reports import write_report
from benchmarks.reporting.tables import markdown_table
from paceline.engine.interface import Engine, StepItem, StepPlan
from paceline.engine.loading import load_engine
from paceline.runtime.config import DEFAULT_MODEL, EngineSettings

PREFIX = 128
ROWS = (1, 2, 4, 5, 8, 9, 16)
WARM_UP = 3
READS = 15
COLUMNS = 1536
"""Width of the matrix that is read: the longest of SmolLM2-135M's rows."""


@dataclass(frozen=True)
class StepTime:
    """Steps of one shape, ms; `floor_ms` is the same for all rows."""

    threads: int
    rows: int
    median_ms: float
    p99_ms: float
    floor_ms: float
    over_one_row: float

    @property
    def over_floor(self) -> float:
        """Step ÷ floor."""
        return self.median_ms / self.floor_ms


@dataclass(frozen=True)
class Bandwidth:
    """Reading `weight_bytes` with some threads; GB/s by way of reading, the best median of two series."""

    threads: int
    weight_bytes: int
    gb_per_s: Mapping[str, float]

    @property
    def best(self) -> float:
        """The fastest way's."""
        return max(self.gb_per_s.values())

    @property
    def floor_ms(self) -> float:
        """Time to read the weights once."""
        return self.weight_bytes / self.best / 1e6


def weight_elements(model: str) -> int:
    """Weights that every step multiplies: all but an embedding that isn't the head too."""
    config = AutoConfig.from_pretrained(hf_folder(model))
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config)
    embedding, head = shapes.get_input_embeddings().weight, shapes.get_output_embeddings().weight
    every: int = sum(weight.numel() for weight in shapes.parameters())
    return every if head is embedding else every - int(embedding.numel())


def read_bandwidth(elements: int, threads: int) -> dict[str, float]:
    """GB/s of each way to read a buffer of so many float32; median of `READS`."""
    torch.set_num_threads(threads)
    matrix = torch.ones(elements // COLUMNS, COLUMNS)
    flat, vector = matrix.view(-1), torch.ones(COLUMNS)
    ways: Mapping[str, Callable[[], torch.Tensor]] = {
        "sum": flat.sum,
        "dot": lambda: torch.dot(flat, flat),
        "matrix × vector": lambda: torch.mv(matrix, vector),
    }
    return {name: matrix.nbytes / 1e6 / _median_ms(read, READS) for name, read in ways.items()}


def _median_ms(work: Callable[[], object], times: int) -> float:
    return float(np.median(_taken_ms(work, times)))


def _taken_ms(work: Callable[[], object], times: int) -> list[float]:
    taken = []
    for _ in range(times + WARM_UP):
        start = time.perf_counter_ns()
        work()
        taken.append((time.perf_counter_ns() - start) / 1e6)
    return taken[WARM_UP:]


def step_ms(engine: Engine, rows: int, steps: int) -> list[float]:
    """Steps of `rows` rows behind the prefix."""
    engine.open(1, PREFIX + rows)
    engine.step(StepPlan((StepItem(1, 0, tuple(range(PREFIX))),)))
    plan = StepPlan((StepItem(1, PREFIX, tuple(range(rows)), logit_rows=tuple(range(rows))),))
    taken = _taken_ms(lambda: engine.step(plan), steps)
    engine.close(1)
    return taken


def measure(model: str, threads: int, steps: int, turns: int) -> tuple[list[StepTime], Bandwidth]:
    """All rows in turn, several turns, with bandwidth before and after."""
    elements = weight_elements(model)
    reads = [read_bandwidth(elements, threads)]
    engine = load_engine(model, EngineSettings(threads=threads, dtype="float32"))
    taken: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for _ in range(turns):
        for rows in ROWS:
            taken[rows] += step_ms(engine, rows, -(-steps // turns))
    del engine
    reads.append(read_bandwidth(elements, threads))
    bandwidth = Bandwidth(threads, 4 * elements, {way: max(read[way] for read in reads) for way in reads[0]})
    one = float(np.median(taken[ROWS[0]]))
    return [_step_time(threads, rows, taken[rows], bandwidth.floor_ms, one) for rows in ROWS], bandwidth


def _step_time(threads: int, rows: int, taken: Sequence[float], floor_ms: float, one_row_ms: float) -> StepTime:
    median = float(np.median(taken))
    return StepTime(threads, rows, median, float(np.percentile(taken, 99)), floor_ms, median / one_row_ms)


def report(times: Sequence[StepTime], bandwidths: Sequence[Bandwidth]) -> str:
    """Floors, then steps."""
    floors = [
        {
            "threads": each.threads,
            "weights MB": f"{each.weight_bytes / 1e6:.0f}",
            **{f"{way} GB/s": f"{rate:.1f}" for way, rate in each.gb_per_s.items()},
            "floor ms": f"{each.floor_ms:.1f}",
        }
        for each in bandwidths
    ]
    steps = [
        {
            "threads": each.threads,
            "rows": each.rows,
            "median ms": f"{each.median_ms:.1f}",
            "p99 ms": f"{each.p99_ms:.1f}",
            "÷ floor": f"{each.over_floor:.2f}",
            "÷ one row": f"{each.over_one_row:.2f}",
        }
        for each in times
    ]
    return f"## Reading the weights\n\n{markdown_table(floors)}\n## Steps\n\n{markdown_table(steps)}"


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--steps", type=int, default=90, help="Steps of each number of rows, over all turns.")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", nargs="+", type=int, default=list(range(1, (os.cpu_count() or 1) + 1)))
    parser.add_argument("--out", type=Path, default=Path("docs/reports"))
    given = parser.parse_args()
    settings = {"model": given.model, "precision": "float32", "steps": str(given.steps), "turns": str(given.turns)}
    settings |= {name: os.environ.get(name, "unset") for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    settings |= {"load average before": load_average()}
    times: list[StepTime] = []
    bandwidths: list[Bandwidth] = []
    for threads in given.threads:
        found, bandwidth = measure(given.model, threads, given.steps, given.turns)
        times += found
        bandwidths.append(bandwidth)
    print(write_report(given.out, "step-time", settings, [*bandwidths, *times], report(times, bandwidths)))


if __name__ == "__main__":
    main()
