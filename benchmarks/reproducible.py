"""What reproducible mode costs: `python -m benchmarks.reproducible`.

Steps of 1, 2, 5, 9 rows of one session, of 1 and 5 rows of eight sessions, and whole prompts, with ragged shapes
and with fixed ones, in turns. Prints medians in milliseconds and what fixed shapes take more.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import numpy as np

from benchmarks.reporting.environment import as_markdown, describe, load_average
from paceline.engine.interface import Engine, Prefix, StepItem, StepPlan
from paceline.engine.loading import load_engine
from paceline.runtime.config import DEFAULT_MODEL, EngineSettings

CASES = (*((1, rows, length) for length in (128, 1000) for rows in (1, 2, 5, 9)), (8, 1, 128), (8, 5, 128))
PROMPTS = (20, 64, 512)
CHUNK = 128


def prefill(engine: Engine, session: int, tokens: int) -> None:
    """Compute a prompt by chunks."""
    for start in range(0, tokens, CHUNK):
        engine.step(StepPlan((StepItem(session, start, tuple(range(start, min(start + CHUNK, tokens)))),)))


def opened(engine: Engine, sessions: int, length: int, rows: int) -> StepPlan:
    """Sessions that hold a prompt, and a step of `rows` rows behind it for each."""
    for session in range(sessions):
        engine.open(session, length + rows, Prefix(prompt_rows=length))
        prefill(engine, session, length)
    tokens = tuple(range(rows))
    return StepPlan(tuple(StepItem(session, length, tokens, logit_rows=tokens) for session in range(sessions)))


def milliseconds(work: Callable[[], object]) -> float:
    """Time of one call."""
    start = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - start) / 1e6


def compare_steps(engines: tuple[Engine, Engine], case: tuple[int, int, int], repeats: int) -> list[float]:
    """Medians of both engines for (sessions, rows, length)."""
    sessions, rows, length = case
    plans = [opened(engine, sessions, length, rows) for engine in engines]
    taken: list[list[float]] = [[], []]
    for _ in range(repeats + 2):
        for engine, plan, each in zip(engines, plans, taken, strict=True):
            each.append(milliseconds(lambda engine=engine, plan=plan: engine.step(plan)))  # type: ignore[misc]
    for engine in engines:
        for session in range(sessions):
            engine.close(session)
    return [float(np.median(each[2:])) for each in taken]


def compare_prompts(engines: tuple[Engine, Engine], tokens: int, repeats: int) -> list[float]:
    """Medians of both engines for a whole prompt."""
    taken: list[list[float]] = [[], []]
    for _ in range(repeats):
        for engine, each in zip(engines, taken, strict=True):
            engine.open(0, tokens, Prefix(prompt_rows=tokens))
            each.append(milliseconds(lambda engine=engine: prefill(engine, 0, tokens)))  # type: ignore[misc]
            engine.close(0)
    return [float(np.median(each)) for each in taken]


def main() -> None:
    """Measure and print a Markdown report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rows", type=int, default=EngineSettings().reproducible_rows, help="reproducible_rows")
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    facts = {name: str(getattr(arguments, name)) for name in ("model", "threads", "rows", "repeats")}
    print("# What reproducible mode costs\n")
    print(as_markdown(describe() | facts | {"load average": load_average()}))
    settings = EngineSettings(threads=arguments.threads)
    fixed = settings.model_copy(update={"reproducible": True, "reproducible_rows": arguments.rows})
    engines = (load_engine(arguments.model, settings), load_engine(arguments.model, fixed))
    print("| what | ragged ms | fixed ms | fixed / ragged |\n|---|---|---|---|")
    for case in CASES:
        sessions, rows, length = case
        report(f"{sessions} × {rows} rows behind {length}", compare_steps(engines, case, arguments.repeats))
    for tokens in PROMPTS:
        report(f"prompt of {tokens}", compare_prompts(engines, tokens, max(3, arguments.repeats // 5)))


def report(what: str, medians: list[float]) -> None:
    """Print one row."""
    ragged, fixed = medians
    print(f"| {what} | {ragged:.1f} | {fixed:.1f} | {fixed / ragged:.2f} |", flush=True)


if __name__ == "__main__":
    main()
