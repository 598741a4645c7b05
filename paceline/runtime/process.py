"""Parts that the processes of the three services share: the log, the exit codes, the last line of a refusal.

The two ways to stop a process: a signal, or the end of the process that started it.

The first signal lets running work come to its end. The second ends the process at once. The exit status is then 128
plus the signal's number, as a shell reports a process that the signal has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import uvloop

from paceline.protocol.errors import InvalidInput, PacelineError, Unsupported, VocabularyMismatch
from paceline.runtime.logs import log_to_stderr, message_of

logger = logging.getLogger(__name__)

BAD_CONFIGURATION = 2
FAILURE = 1
SPIN_COUNT = 20_000
"""Turns that an OpenMP thread waits for work before it sleeps, about 0.1 ms: the microseconds between two layers.

If it slept at once, each layer would wait for its wake-up; if it spun for ever, it would take the cores of others.
"""
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


def leave_torch_out() -> None:
    """Keep torch from being imported; call it first in a process that only needs a model's tokenizer.

    The library of tokenizers imports it where it is installed, for three seconds and 230 MiB (SmolLM2-135M's).
    """
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # so Python documents that a module must not load
    # Otherwise it says on every start that models are not available.
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"


def keep_loaded() -> None:
    """Exclude everything loaded so far from garbage collection; call it once, before serving.

    Torch, numba and a model are a million objects that live as long as the process. A full
    collection would take 200 ms to walk them, and stall every session of a target meanwhile.
    """
    gc.collect()
    gc.freeze()


def end_process(reason: str) -> NoReturn:
    """End the process at once: what its threads wait for never comes, and may keep the interpreter from ending."""
    logger.critical("ended: %s", reason)
    logging.shutdown()
    os._exit(FAILURE)


def end_if_device_lost(error: BaseException) -> None:
    """End the process after an error of a GPU, which stays: every later step would fail, and health not say so."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.AcceleratorError):
        end_process(f"the device is lost ({str(error).partition(chr(10))[0]})")


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


REAP_SECONDS = 0.01
"""Time between two looks at a child that somebody waits for."""
_reaping = threading.Lock()


def reap(child: subprocess.Popen[Any], timeout_s: float = 0.0) -> int | None:
    """Wait for a child's end for at most `timeout_s`; returns its exit code, `None` while it runs.

    Signals may raise here at any time. After one in `Popen.poll`, or in `Popen.wait` with a timeout, the child's own
    lock may be held for ever, and the next wait hangs.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        with _reaping:
            if child.returncode is None:
                try:
                    pid, status = os.waitpid(child.pid, os.WNOHANG)
                except ChildProcessError:  # an interrupt took the status along; `Popen` says 0 then, too
                    pid, status = child.pid, 0
                child.returncode = os.waitstatus_to_exitcode(status) if pid else None
        left_s = deadline - time.monotonic()
        if child.returncode is not None or left_s <= 0:
            return child.returncode
        time.sleep(min(left_s, REAP_SECONDS))


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
