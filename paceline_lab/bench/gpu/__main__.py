"""What a step costs on a GPU beside what memory allows, and what the service adds.

    python -m paceline_lab.bench.gpu --shape 1b,8b,32b --out docs/reports
    python -m paceline_lab.bench.gpu --device cpu --shape tiny --steps 3

Random weights of real shapes. In every case a number of sessions, each behind `--length` tokens, verify rows that
are drawn on the device (coupled, temperature 1). A step's **floor** is the bytes of weights and of KV rows that it
must read, divided by the bandwidth of a large copy, measured in the same run (bytes read plus bytes written). With
graphs and without; with logits brought to the host in place of draws; and through the target service on loopback,
where the overhead is what a round takes beyond the service's own time for forward pass and draws.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from paceline.engine.checks import plain_reference, self_check
from paceline.engine.cpu.fused import fuse_layers
from paceline.engine.cuda.graphs import runner_for
from paceline.engine.cuda.pages import whole_pages
from paceline.engine.cuda.static_engine import StaticEngine
from paceline.engine.decoder import DecoderFacts, examine
from paceline.engine.interface import Draw, StepItem, StepPlan
from paceline.engine.transformer import ServedDecoder
from paceline.models.tokenizer import TableTokenizer
from paceline.protocol.proposal import ROOT, Acceptance, Proposal
from paceline.protocol.sampling import NoiseKey
from paceline.protocol.target import Round
from paceline.runtime.config import EngineSettings
from paceline_lab import REPORTS
from paceline_lab.bench.gpu.models import SHAPES, random_model, weights_read
from paceline_lab.bench.gpu.service import RoundTimes, through_the_service
from paceline_lab.reporting.presentation import markdown_table
from paceline_lab.reporting.reports import write_rows

ROWS = (1, 4, 8, 16)
SESSIONS = (1, 8, 32)
WARM_UP = 3
"""Steps before the measured ones: the first as it is, the second captured, the third replayed."""
COPIES = 20
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 24}
CHUNK = 512


@dataclass(frozen=True)
class GpuCase:
    """Medians of one case. `floor_ms` is the time that the bytes take at the bandwidth of a copy."""

    shape: str
    sessions: int
    rows: int
    floor_ms: float
    graph_ms: float
    direct_ms: float
    logits_ms: float
    service_ms: float
    overhead_ms: float

    @property
    def over_floor(self) -> float:
        """Step time ÷ floor, with graphs."""
        return self.graph_ms / self.floor_ms


@dataclass(frozen=True)
class ServiceLoad:
    """The load of a case: sessions behind a prefix, and rows of each."""

    sessions: int
    rows: int
    length: int

    @property
    def plan(self) -> StepPlan:
        """Return the step's plan, which can be repeated: it begins at the same base every time."""
        tokens = tuple(range(1, self.rows + 1))
        rows = tuple(range(self.rows))
        return StepPlan(tuple(StepItem(s, self.length, tokens, logit_rows=rows) for s in range(self.sessions)))

    def draws(self, vocab_size: int) -> list[Draw | None]:
        """Return a draw of each session, over all of its rows."""
        k = self.rows - 1
        proposal = Proposal(1, tuple(range(2, self.rows + 1)), (1.0,) * k) if k else None
        return [
            Draw(Acceptance.COUPLED, 1.0, NoiseKey(s), Round(s + 1, self.length, ROOT, (1,), proposal), vocab_size)
            for s in range(self.sessions)
        ]


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second of a large copy, read plus written; the best of `COPIES`."""
    source = torch.ones(COPY_BYTES.get(device.type, 1 << 24), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = min(_seconds(lambda: target.copy_(source), device) for _ in range(COPIES))
    return 2 * source.nbytes / best


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    _synchronize(device)
    start_s = time.perf_counter()
    work()
    _synchronize(device)
    return time.perf_counter() - start_s


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_ms(work: Callable[[], object], steps: int) -> float:
    """Return the median time of `steps` calls after the warm-up."""
    times_ms = []
    for _ in range(WARM_UP + steps):
        start_s = time.perf_counter()
        work()
        times_ms.append((time.perf_counter() - start_s) * 1e3)
    return float(np.median(times_ms[WARM_UP:]))


class Bench:
    """One model, and the engines on it; one engine at a time holds a pool."""

    def __init__(
        self, shape: str, device: torch.device, dtype: torch.dtype, loads: Sequence[ServiceLoad], rounds: int
    ) -> None:
        """Make the model, and check an engine of it as the service would."""
        self.shape = shape
        self.device = device
        length = max(load.length for load in loads)
        max_length = length + max(load.rows for load in loads) + WARM_UP + rounds + 64
        self._rows = max(load.sessions * whole_pages(max_length) for load in loads)
        model = random_model(shape, dtype, device, max_length)
        self.weights = weights_read(model)
        self.settings = EngineSettings(max_num_seqs=max(2, *(load.sessions for load in loads)), prefix_reuse=False)
        tokenizer = TableTokenizer(SHAPES[shape]["vocab_size"], None)
        self.facts: DecoderFacts = examine(model, tokenizer, self.settings, shape, static=True)
        self._reference = plain_reference(model, self.facts.info(self._rows), self.facts.attention)
        fuse_layers(model)
        self._model: PreTrainedModel = model

    def engine(self, *, graphs: bool) -> StaticEngine:
        """Return an engine that has passed the check of every engine."""
        runner = runner_for(self.device, graphs=graphs)
        facts, info = self.facts, self.facts.info(self._rows)
        engine = StaticEngine(ServedDecoder(self._model, info, facts.attention, self.settings), runner)
        for _ in range(WARM_UP):
            self_check(engine, self._reference)
        return engine

    def floor_ms(self, load: ServiceLoad, bandwidth: float) -> float:
        """Return the floor of one step: its bytes at the bandwidth of a copy."""
        kv = load.sessions * (load.length + load.rows) * self.facts.attention.shape.row_bytes
        return (self.weights + kv) / bandwidth * 1e3


def steps_ms(engine: StaticEngine, load: ServiceLoad, steps: int) -> tuple[float, float]:
    """Return the median time of a step whose rows are drawn, and of a step whose logits are brought to the host."""
    plan, draws = load.plan, load.draws(engine.info.fingerprint.vocab_size)

    def draw() -> None:
        for answer in engine.step_and_draw(plan, draws):
            assert not isinstance(answer, np.ndarray)
            answer.drawn_tokens()

    for session in range(load.sessions):
        engine.open(session, load.length + load.rows)
        for start in range(0, load.length, CHUNK):
            engine.step(StepPlan((StepItem(session, start, (1,) * min(CHUNK, load.length - start)),)))
    medians = median_ms(draw, steps), median_ms(lambda: engine.step(plan), steps)
    for session in range(load.sessions):
        engine.close(session)
    return medians


def measure(bench: Bench, loads: Sequence[ServiceLoad], steps: int, bandwidth: float) -> list[GpuCase]:
    """Measure all cases of one model."""
    direct = bench.engine(graphs=False)
    direct_times = [steps_ms(direct, load, steps)[0] for load in loads]
    del direct
    engine = bench.engine(graphs=True)
    graph_times = [steps_ms(engine, load, steps) for load in loads]
    round_times: list[RoundTimes] = [
        asyncio.run(through_the_service(engine, bench.settings, load.sessions, load.rows, load.length, steps))
        for load in loads
    ]
    return [
        GpuCase(
            shape=bench.shape,
            sessions=load.sessions,
            rows=load.rows,
            floor_ms=bench.floor_ms(load, bandwidth),
            graph_ms=graph_ms,
            direct_ms=direct_ms,
            logits_ms=logits_ms,
            service_ms=each.round_ms,
            overhead_ms=each.round_ms - each.step_ms,
        )
        for load, (graph_ms, logits_ms), direct_ms, each in zip(
            loads, graph_times, direct_times, round_times, strict=True
        )
    ]


def table(cases: Sequence[GpuCase], *, graphs: bool) -> str:
    """Return a table of one row a case."""
    column = "graph ms" if graphs else "step ms"
    rows = []
    for case in cases:
        row: dict[str, object] = {"shape": case.shape, "sessions": case.sessions, "rows each": case.rows}
        row |= {"floor ms": case.floor_ms, column: case.graph_ms, "÷ floor": case.over_floor}
        if graphs:
            row["no graph ms"] = case.direct_ms
        row |= {"logits ms": case.logits_ms, "round ms": case.service_ms, "service overhead ms": case.overhead_ms}
        rows.append(row)
    return markdown_table(rows)


def run(arguments: argparse.Namespace) -> str:
    """Measure everything, and return the report."""
    device = torch.device(arguments.device)
    graphs = device.type == "cuda"
    bandwidth = copy_bandwidth(device)
    pairs = [(sessions, rows) for sessions in arguments.sessions for rows in arguments.rows]
    loads = [ServiceLoad(sessions, rows, arguments.length) for sessions, rows in pairs]
    cases: list[GpuCase] = []
    for shape in arguments.shape:
        bench = Bench(shape, device, getattr(torch, arguments.dtype), loads, arguments.steps)
        cases += measure(bench, loads, arguments.steps, bandwidth)
        del bench
    settings = {
        "device": torch.cuda.get_device_name(device) if graphs else "cpu: no graphs, and no figure for any GPU",
        "copy bandwidth": f"{bandwidth / 1e9:.1f} GB/s, read plus written",
        "dtype": arguments.dtype,
        "tokens before the step": str(arguments.length),
        "steps": f"{arguments.steps} after {WARM_UP}, medians",
    }
    return write_rows(arguments.out, "gpu", settings, cases, table(cases, graphs=graphs))


def _integers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def _shapes(text: str) -> list[str]:
    shapes = text.split(",")
    if unknown_shapes := {*shapes} - SHAPES.keys():
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown_shapes))}: must be among {', '.join(SHAPES)}")
    return shapes


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write a report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", type=_shapes, default=["1b", "8b", "32b"], help="1b, 8b, 32b, tiny")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--sessions", type=_integers, default=list(SESSIONS))
    parser.add_argument("--rows", type=_integers, default=list(ROWS), help="of each session")
    parser.add_argument("--length", type=int, default=1024, help="tokens before the step")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=Path, default=REPORTS)
    arguments = parser.parse_args(argv)
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("no CUDA device here; --device cpu --shape tiny runs the same code, for what it is worth")
    print(run(arguments))


if __name__ == "__main__":
    main()
