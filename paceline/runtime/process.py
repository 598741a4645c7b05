"""Parts that the processes of the three services share: the log, the exit codes, the last line of a refusal."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import platform
import re
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import uvloop

from paceline.protocol.errors import InvalidInput, PacelineError, Unsupported, VocabularyMismatch
from paceline.runtime.logs import log_to_stderr, message_of

logger = logging.getLogger(__name__)

BAD_CONFIGURATION = 2
FAILURE = 1
REFUSALS = (InvalidInput, Unsupported, VocabularyMismatch)
_REFUSAL = re.compile(rf" ERROR {re.escape(__name__)} ([\w ]+ refused: .*)")


def own_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_service(name: str, start: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a service until it is stopped; logs go to stderr, one line each.

    `start` reads and checks the configuration and returns what to run. A `PacelineError`
    that either raises is logged as one line and ends the process: with exit code 2 for bad
    configuration, else 1. `find_refusal` recognises the line if it says what was refused.
    """
    log_to_stderr()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(start())
    except PacelineError as error:
        if error.__cause__ is not None:
            # The library's whole message; the error has its gist.
            for line in str(error.__cause__).splitlines():
                logger.info("%s", line)
        outcome = "refused" if isinstance(error, REFUSALS) else "failed"
        logger.error("%s %s: %s", name, outcome, " ".join(error.message.splitlines()))
        sys.exit(BAD_CONFIGURATION if isinstance(error, InvalidInput) else FAILURE)


def find_refusal(log: Iterable[str]) -> str | None:
    """What a service refused and why, as `run_service` logged it; None: it refused nothing."""
    matches = (_REFUSAL.search(message_of(line)) for line in log)
    return next((match[1] for match in matches if match), None)


def keep_loaded() -> None:
    """Exclude everything loaded so far from garbage collection; call it once, before serving.

    Torch, numba and a model are a million objects that live as long as the process. A full
    collection would take 200 ms to walk them, and stall every session of a target meanwhile.
    """
    gc.collect()
    gc.freeze()


def processor_name() -> str:
    """The processor's own name, or what the platform calls it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def describe_exit(code: int | None) -> str:
    """How a child process ended, by its exit code as `subprocess` and `multiprocessing` give it."""
    if code is None:
        return "no exit code yet"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
