"""The cases of the GPU benchmark, whatever computes them: a step, its time, and their table."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paceline.engine.executor import Executor
from paceline.engine.interface import Draw, Engine, StepItem, StepPlan
from paceline.protocol.proposal import ROOT, Acceptance, Proposal
from paceline.protocol.sampling import NoiseKey
from paceline.protocol.target import Round
from paceline.runtime.config import EngineSettings
from paceline_lab.bench.gpu.service import RoundTimes, through_the_service
from paceline_lab.reporting.presentation import markdown_table

WARM_UP = 3
"""Steps before the measured ones: the first as it is, the second captured, the third replayed."""
CHUNK = 512
SPARE_TOKENS = 64


@dataclass(frozen=True)
class GpuCase:
    """Medians of one case.

    Attributes:
        model: a shape's name, or a file's.
        sessions: in every step.
        rows: of each session.
        floor_ms: the time that the step's bytes take at the bandwidth of a copy.
        step_ms: of a step; in graphs where there are some.
        service_ms: of a round through the service.
        overhead_ms: of that, what the service's own forward pass and draws don't take.
        direct_ms: of a step without graphs; None: there are none.
        torch_ms: of a step in graphs by torch's own kernels; None: there are no graphs.
        logits_ms: of a step whose logits are brought to the host; None: every step's are.
    """

    model: str
    sessions: int
    rows: int
    floor_ms: float
    step_ms: float
    service_ms: float
    overhead_ms: float
    direct_ms: float | None = None
    torch_ms: float | None = None
    logits_ms: float | None = None

    @property
    def over_floor(self) -> float:
        """Step time ÷ floor."""
        return self.step_ms / self.floor_ms

    @property
    def plain_speed(self) -> float | None:
        """Tokens per second of all sessions through the service; None: rounds have proposals."""
        return self.sessions / self.service_ms * 1e3 if self.rows == 1 else None


class Measured(NamedTuple):
    """Facts of a run, its cases, and findings about our engine, where it ran."""

    facts: dict[str, str]
    cases: list[GpuCase]
    findings: Sequence[dict[str, object]] = ()


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

    @property
    def kv_rows(self) -> int:
        """KV rows that the step reads."""
        return self.sessions * (self.length + self.rows)

    def draws(self, vocab_size: int) -> list[Draw | None]:
        """Return a draw of each session, over all of its rows."""
        k = self.rows - 1
        proposal = Proposal(1, tuple(range(2, self.rows + 1)), (1.0,) * k) if k else None
        return [
            Draw(Acceptance.COUPLED, 1.0, NoiseKey(s), Round(s + 1, self.length, ROOT, (1,), proposal), vocab_size)
            for s in range(self.sessions)
        ]

    @contextmanager
    def prefill(self, engine: Engine) -> Iterator[None]:
        """Open the sessions and compute their prefixes; close them at the end."""
        for session in range(self.sessions):
            engine.open(session, self.length + self.rows)
            for start in range(0, self.length, CHUNK):
                engine.step(StepPlan((StepItem(session, start, (1,) * min(CHUNK, self.length - start)),)))
        yield
        for session in range(self.sessions):
            engine.close(session)


def longest(loads: Sequence[ServiceLoad], rounds: int) -> int:
    """Return the tokens of the longest session that so many rounds make."""
    return max(load.length + load.rows for load in loads) + WARM_UP + rounds + SPARE_TOKENS


def median_ms(work: Callable[[], object], steps: int) -> float:
    """Return the median time of `steps` calls after the warm-up."""
    times_ms = []
    for _ in range(WARM_UP + steps):
        start_s = time.perf_counter()
        work()
        times_ms.append((time.perf_counter() - start_s) * 1e3)
    return float(np.median(times_ms[WARM_UP:]))


def rounds_of(
    engine: Engine, executor: Executor, settings: EngineSettings, loads: Sequence[ServiceLoad], rounds: int
) -> list[RoundTimes]:
    """Run each load through a target service, whose steps run on the executor's thread."""
    return [
        asyncio.run(through_the_service(engine, executor, settings, load.sessions, load.rows, load.length, rounds))
        for load in loads
    ]


def case_of(
    model: str,
    load: ServiceLoad,
    floor_ms: float,
    step_ms: float,
    rounds: RoundTimes,
    direct_ms: float | None = None,
    torch_ms: float | None = None,
    logits_ms: float | None = None,
) -> GpuCase:
    """Return the case of a load; `GpuCase` says what the times are."""
    overhead_ms = rounds.round_ms - rounds.step_ms
    times_ms = (step_ms, rounds.round_ms, overhead_ms, direct_ms, torch_ms, logits_ms)
    return GpuCase(model, load.sessions, load.rows, floor_ms, *times_ms)


def table(cases: Sequence[GpuCase], *, graphs: bool) -> str:
    """Return a table of one row a case."""
    rows = []
    for case in cases:
        row: dict[str, object] = {"model": case.model, "sessions": case.sessions, "rows each": case.rows}
        row |= {"floor ms": case.floor_ms, "graph ms" if graphs else "step ms": case.step_ms}
        row |= {"÷ floor": case.over_floor}
        if graphs:
            row |= {"no graph ms": case.direct_ms, "torch's kernels ms": case.torch_ms}
        if case.logits_ms is not None:
            row["logits ms"] = case.logits_ms
        row |= {"round ms": case.service_ms, "service overhead ms": case.overhead_ms}
        rows.append(row | {"plain tokens/s": "–" if case.plain_speed is None else case.plain_speed})
    return markdown_table(rows)
