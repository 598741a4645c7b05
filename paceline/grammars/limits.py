"""Limits of a grammar worker that the operating system enforces."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path

from paceline.sampling.grammar import COMPILING_STACK_BYTES

_STATM = Path("/proc/self/statm")
_PR_SET_PDEATHSIG = 1
_NICENESS = 10
"""Niceness of a long compilation: forward passes and the masks of other grammars come first."""


def memory() -> tuple[int, int]:
    """Address space and resident memory of this process, in bytes; zeros where the system doesn't report them."""
    try:
        pages = _STATM.read_text().split()
    except OSError:
        return 0, 0
    return int(pages[0]) * resource.getpagesize(), int(pages[1]) * resource.getpagesize()


def confine(memory_bytes: int) -> None:
    """Limit this process's memory, write no core file, and end with the parent process.

    If the machine runs out of memory, the kernel kills this process first.
    """
    parent = os.getppid()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    address_space, _ = memory()
    if address_space:
        most = address_space + COMPILING_STACK_BYTES + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
    if os.getppid() != parent:
        os._exit(1)


def allow_cpu(seconds: float) -> None:
    """Have the system end this process after so many more seconds of CPU time, rounded up to whole seconds."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(usage.ru_utime + usage.ru_stime + seconds)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (limit + 1, most))


def step_back() -> None:
    """Lower the priority of this process's threads but for the main one, which follows the grammar later."""
    if sys.platform == "linux":
        for thread in {int(task.name) for task in Path("/proc/self/task").iterdir()} - {os.getpid()}:
            with suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, thread, _NICENESS)
