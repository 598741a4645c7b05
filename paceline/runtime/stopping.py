"""The two ways to stop a process: a signal, or the end of the process that started it.

The first signal lets running work come to its end. The second ends the process at once. The exit status is then 128
plus the signal's number, as a shell reports a process that the signal has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

logger = logging.getLogger(__name__)

BY_SIGNAL = 128
"""Added to a signal's number, this is the exit status of a process that its second signal has ended."""
LATE_SECONDS = 10.0
"""Time that a process has to end, beyond its drain, when its starter is gone; chosen, not tuned."""
READ_BYTES = 4096


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that stop a process: SIGTERM, SIGINT, and SIGHUP unless the process ignores it, as under nohup."""
    hang_up = getattr(signal, "SIGHUP", None)
    heeds_hang_up = hang_up is not None and signal.getsignal(hang_up) is not signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT, *((hang_up,) if heeds_hang_up else ()))


@contextmanager
def signals_stop(stop: asyncio.Event) -> Iterator[None]:
    """Within the block the first signal sets `stop`, where platform and thread allow; the second ends the process."""
    loop = asyncio.get_running_loop()
    numbers: list[signal.Signals] = []
    came: list[signal.Signals] = []

    def on_signal(number: signal.Signals) -> None:
        came.append(number)
        if len(came) > 1:
            os._exit(BY_SIGNAL + number)
        logger.info("stopping: signal=%s; another one ends the process at once", number.name)
        stop.set()

    for number in stop_signals():
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, on_signal, number)
            numbers.append(number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Within the block the first signal raises KeyboardInterrupt, as Ctrl-C does; the second raises SystemExit."""
    came: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) > 1:
            sys.exit(BY_SIGNAL + number)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, on_signal) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_with_stdin(stop: asyncio.Event, drain_seconds: float) -> None:
    """Set `stop` when standard input ends, and end the process if it is still there some time after its drain.

    Standard input is a pipe whose other end the starter alone holds. The kernel closes it however the starter ends.
    """
    loop = asyncio.get_running_loop()

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, READ_BYTES):
                pass
        logger.warning("stopping: standard input has ended, so the process that started this one is gone")
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has stopped already
            loop.call_soon_threadsafe(stop.set)
        time.sleep(drain_seconds + LATE_SECONDS)
        os._exit(BY_SIGNAL + signal.SIGKILL)

    threading.Thread(target=watch, name="stdin-watch", daemon=True).start()
