"""Steps of our own engine with random weights of real shapes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, Literal, ParamSpec, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from paceline.engine.checks import plain_reference, self_check
from paceline.engine.cpu.fused import fuse_layers
from paceline.engine.cuda.device import empty_caches
from paceline.engine.cuda.graphs import runner_for
from paceline.engine.cuda.pages import whole_pages
from paceline.engine.cuda.static_engine import StaticEngine
from paceline.engine.decoder import DecoderFacts, examine
from paceline.engine.executor import Executor
from paceline.engine.transformer import ServedDecoder
from paceline.models.tokenizer import TableTokenizer
from paceline.runtime.config import EngineSettings
from paceline_lab.bench.gpu.cases import (
    WARM_UP,
    GpuCase,
    Measured,
    ServiceLoad,
    case_of,
    longest,
    median_ms,
    rounds_of,
)
from paceline_lab.bench.gpu.findings import Finding, Ground, measure_findings
from paceline_lab.bench.gpu.models import SHAPES, random_model, weights_read

P = ParamSpec("P")
T = TypeVar("T")
COPIES = 20
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 24}


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


def kernels_for(device: torch.device) -> Literal["torch", "triton"]:
    """Return the kernels that are measured on a device beside torch's: Triton's compile for GPUs alone."""
    return "triton" if device.type == "cuda" else "torch"


class Bench:
    """One model, and the engines on it; one engine at a time holds a pool."""

    def __init__(
        self, shape: str, device: torch.device, dtype: torch.dtype, loads: Sequence[ServiceLoad], rounds: int
    ) -> None:
        """Make the model, and check an engine of it as the service would."""
        self.shape = shape
        self.device = device
        max_length = longest(loads, rounds)
        self._rows = max(load.sessions * whole_pages(max_length) for load in loads)
        model = random_model(shape, dtype, device, max_length)
        self.weights = weights_read(model)
        sessions = max(load.sessions for load in loads)
        self.settings = EngineSettings(max_num_seqs=sessions, prefix_reuse=False, kernels=kernels_for(device))
        tokenizer = TableTokenizer(SHAPES[shape]["vocab_size"], None)
        self.facts: DecoderFacts = examine(model, tokenizer, self.settings, shape, static=True)
        self._reference = plain_reference(model, self.facts.info(self._rows), self.facts.attention)
        fuse_layers(model)
        self._model: PreTrainedModel = model

    def engine(self, *, graphs: bool, **settings: Any) -> StaticEngine:
        """Return an engine that has passed the check of every engine."""
        runner = runner_for(self.device, graphs=graphs)
        facts, info = self.facts, self.facts.info(self._rows)
        changed = self.settings.model_copy(update=settings)
        engine = StaticEngine(ServedDecoder(self._model, info, facts.attention, changed), runner)
        for _ in range(WARM_UP):
            self_check(engine, self._reference)
        return engine

    def floor_ms(self, load: ServiceLoad, bandwidth: float) -> float:
        """Return the floor of one step: its bytes at the bandwidth of a copy."""
        return (self.weights + load.kv_rows * self.facts.attention.shape.row_bytes) / bandwidth * 1e3


def steps_ms(engine: StaticEngine, load: ServiceLoad, steps: int) -> tuple[float, float]:
    """Return the median time of a step whose rows are drawn, and of a step whose logits are brought to the host."""
    plan, draws = load.plan, load.draws(engine.info.fingerprint.vocab_size)

    def draw() -> None:
        for answer in engine.step_and_draw(plan, draws):
            assert not isinstance(answer, np.ndarray)
            answer.drawn_tokens()

    with load.prefill(engine):
        return median_ms(draw, steps), median_ms(lambda: engine.step(plan), steps)


def measure(
    bench: Bench, loads: Sequence[ServiceLoad], steps: int, bandwidth: float, executor: Executor
) -> tuple[list[GpuCase], list[Finding]]:
    """Measure all cases of one model, and what the engine was expected to show.

    Engines are made and run on the executor's thread alone: library handles belong to a thread.
    """

    def run(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return asyncio.run(executor.run(work, *args, **kwargs))

    def step_times(**settings: Any) -> list[float]:
        engine = bench.engine(**settings)
        return [steps_ms(engine, load, steps)[0] for load in loads]

    direct_times = run(step_times, graphs=False)
    empty_caches(bench.device)
    torch_times = run(step_times, graphs=True, kernels="torch")
    empty_caches(bench.device)
    engine = run(bench.engine, graphs=True)
    graph_times = [run(steps_ms, engine, load, steps) for load in loads]
    round_times = rounds_of(engine, executor, bench.settings, loads, steps)
    findings = run(measure_findings, Ground(engine, bench.settings, bandwidth))
    cases = [
        case_of(bench.shape, load, bench.floor_ms(load, bandwidth), graph_ms, rounds, direct_ms, torch_ms, logits_ms)
        for load, (graph_ms, logits_ms), direct_ms, torch_ms, rounds in zip(
            loads, graph_times, direct_times, torch_times, round_times, strict=True
        )
    ]
    return cases, findings


def measure_shapes(
    shapes: Sequence[str], device: torch.device, dtype: str, loads: Sequence[ServiceLoad], steps: int
) -> Measured:
    """Measure models of several shapes; the findings are those on the last one."""
    bandwidth = copy_bandwidth(device)
    cases: list[GpuCase] = []
    findings: list[Finding] = []
    with closing(Executor("gpu-benchmark")) as executor:
        for shape in shapes:
            bench = Bench(shape, device, getattr(torch, dtype), loads, steps)
            shape_cases, findings = measure(bench, loads, steps, bandwidth, executor)
            cases += shape_cases
            del bench
            empty_caches(device)
    cpu = "cpu: no graphs, and no figure for any GPU"
    facts = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "copy bandwidth": f"{bandwidth / 1e9:.1f} GB/s, read plus written",
        "dtype": dtype,
    }
    return Measured(facts, cases, findings)
