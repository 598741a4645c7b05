"""What the three services' processes have in common: their log, their exit codes, their last words."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import uvloop

from paceline.protocol.errors import InvalidInput, PacelineError, Unsupported, VocabularyMismatch

logger = logging.getLogger(__name__)

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
BAD_CONFIGURATION = 2
FAILED = 1
_REFUSALS = (InvalidInput, Unsupported, VocabularyMismatch)
_REFUSAL = re.compile(rf" ERROR {re.escape(__name__)} ([\w ]+ refused: .*)")


def run_service(name: str, start: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a service until it is stopped; logs go to stderr, one line each.

    `start` checks the configuration and returns what to run. A `PacelineError`
    of either becomes one line, which `find_refusal` knows if it refuses what was asked
    for, and an exit code: 2 for bad configuration, else 1.
    """
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(start())
    except PacelineError as error:
        if error.__cause__ is not None:
            # All that a library says, of which the error has the gist.
            logger.info("%s", error.__cause__)
        outcome = "refused" if isinstance(error, _REFUSALS) else "failed"
        logger.error("%s %s: %s", name, outcome, " ".join(error.message.splitlines()))
        sys.exit(BAD_CONFIGURATION if isinstance(error, InvalidInput) else FAILED)


def find_refusal(log: Iterable[str]) -> str | None:
    """What a service refused and why, as `run_service` has logged it; None: it has refused nothing."""
    found = (_REFUSAL.search(line) for line in log)
    return next((match[1] for match in found if match), None)


def keep_loaded() -> None:
    """Take all that is loaded by now out of the garbage collector's sight; call it once, before serving.

    Torch, numba and a model are a million objects that live as long as the process. A full
    collection walks them for 200 ms, in which a draft misses its round and a target stops every session.
    """
    gc.collect()
    gc.freeze()


def describe_exit(code: int | None) -> str:
    """How a child process ended, by its exit code as `subprocess` and `multiprocessing` give it."""
    if code is None:
        return "no exit code yet"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that it stops its services."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
