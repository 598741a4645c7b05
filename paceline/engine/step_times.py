"""A process that says what a model's steps take with several numbers of threads: a JSON line asks, one answers.

`{"threads": 2, "rows": 5, "seconds": 0.5}` is answered by `{"ms": 240.1}`, the median of the steps that ran for so
long. The first line, `{"ms": 0}`, says that the model is loaded. Threads can't exceed those it was loaded with.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from statistics import median

from paceline.engine.cpu.thread_pool import use_threads
from paceline.engine.interface import Engine, StepItem, StepPlan
from paceline.protocol.errors import PacelineError, Unsupported
from paceline.runtime.logs import log_to_stderr

PREFIX_ROWS = 64
"""Tokens behind which a step is timed: a short chat's, where weights are still all of its time."""
LEAST_STEPS = 3
_SESSION = 1
_TOKEN = 1
"""Of any vocabulary; what a step takes doesn't depend on its tokens."""


def run_step_times(load: Callable[[], Engine]) -> None:
    """Load a model, then answer standard input's lines on standard output until they end.

    Exits with the reason where the model can't be loaded or its steps don't run on this machine's cores.
    """
    log_to_stderr()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    try:
        engine = load()
        stepper = _Stepper(engine)
    except PacelineError as error:
        sys.exit(error.message)
    print(json.dumps({"ms": 0}), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        _set_threads(asked["threads"])
        print(json.dumps({"ms": stepper.median_ms(asked["rows"], asked["seconds"])}), file=answers)


def refuse_gpu(device: str) -> None:
    """Refuse to measure what runs beside the cores.

    Raises:
        Unsupported: a GPU would be taken.
    """
    import torch

    if device != "cpu" and torch.cuda.is_available():
        raise Unsupported("steps run on a GPU, and hardly depend on threads")


def _set_threads(threads: int) -> None:
    if torch := sys.modules.get("torch"):  # a table model never loads it
        torch.set_num_threads(threads)
    use_threads(threads)


class _Stepper:
    """One session whose last rows are computed again and again."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        longest = engine.info.longest_session
        self._prefix = min(PREFIX_ROWS, longest // 2)
        engine.open(_SESSION, min(longest, 2 * PREFIX_ROWS))
        self._step(0, self._prefix)

    def median_ms(self, rows: int, seconds: float) -> float:
        """Of steps for so long, at least a few; one before them finds its buffers and threads."""
        self._step(self._prefix, rows)
        times: list[float] = []
        began = time.perf_counter()
        while len(times) < LEAST_STEPS or time.perf_counter() - began < seconds:
            before = time.perf_counter()
            self._step(self._prefix, rows)
            times.append(1000 * (time.perf_counter() - before))
        return median(times)

    def _step(self, base: int, rows: int) -> None:
        self._engine.step(StepPlan((StepItem(_SESSION, base, (_TOKEN,) * rows, logit_rows=tuple(range(rows))),)))
