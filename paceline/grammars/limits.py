"""What a grammar worker may use, as the operating system enforces it."""

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
"""Of a long compilation: forward passes and the masks of other grammars come first."""


def memory() -> tuple[int, int]:
    """Address space and resident memory of this process, bytes; zeros where the system doesn't tell."""
    try:
        pages = _STATM.read_text().split()
    except OSError:
        return 0, 0
    return int(pages[0]) * resource.getpagesize(), int(pages[1]) * resource.getpagesize()


def confine(memory_bytes: int) -> None:
    """Bound this process's memory, leave no core, and end it with its parent.

    The kernel's own killer, should the machine run out of memory, is to take this process first.
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
    """End this process once it has computed for so long, from now; the system counts whole seconds."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    until = math.ceil(usage.ru_utime + usage.ru_stime + seconds)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (until + 1, most))


def step_back() -> None:
    """Have others compute before this process's threads, but for the main one: it follows the grammar later."""
    if sys.platform == "linux":
        for thread in {int(task.name) for task in Path("/proc/self/task").iterdir()} - {os.getpid()}:
            with suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, thread, _NICENESS)
