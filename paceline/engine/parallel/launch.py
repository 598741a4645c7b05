"""Ranks as processes: start the others, and notice at once when one dies.

On one machine rank 0 starts the others itself; several machines are started by torchrun, which puts
each rank's place into its environment. Nothing here imports torch: health answers while it loads.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from typing import NoReturn

from paceline.engine.parallel.place import Place
from paceline.protocol.errors import PacelineError
from paceline.runtime.config import LOCALHOST, EngineSettings
from paceline.runtime.logs import LogFormat, format_in_use, log_to_stderr
from paceline.runtime.process import FAILURE, describe_exit, stop_signals
from paceline.sampling import racing

logger = logging.getLogger(__name__)
DEATH_SECONDS = 0.5
"""From the moment in which a rank's connections break to its end: the kernel closes them first."""
STOP_SECONDS = 5.0
"""Seconds that ranks may take to stop once they are told; this and the next two are chosen, not tuned."""
REAP_SECONDS = 1.0
"""Seconds that the exit code of an ended process may take to appear."""
REFUSAL_SECONDS = 5.0
"""Seconds that a rank that can't serve waits before it ends: most likely rank 0 gives the same reason first."""
_LOOPBACK = {"linux": "lo", "darwin": "lo0"}
_SET_PDEATHSIG = 1


class RankProcesses:
    """The ranks that rank 0 has started on its own machine.

    They end with rank 0 however it ends, and ignore the signals that stop it: rank 0 lets running
    sessions end first, which takes all ranks.
    """

    def __init__(self, model: str, settings: EngineSettings, degree: int) -> None:
        """Start `degree - 1` ranks; rank 0's own place is `place`, its listening socket `listener`."""
        server = socket.create_server((LOCALHOST, 0), backlog=degree)
        self.place = Place(0, degree, 0, degree, port=server.getsockname()[1])
        self.listener = server.detach()
        # Ranks of one machine need not be reachable from another, unless someone has chosen an interface.
        if sys.platform in _LOOPBACK:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK[sys.platform])
        context = multiprocessing.get_context("spawn")
        self._ranks: dict[int, SpawnProcess] = {}
        self._closing = threading.Event()
        self._reaping = threading.Lock()
        for rank in range(1, degree):
            place = Place(rank, degree, rank, degree, port=self.place.port)
            # Not a fork: gRPC and OpenMP threads don't survive one.
            process = context.Process(
                target=_child,
                args=(model, settings, place, os.getpid(), format_in_use()),
                name=f"rank-{rank}",
                daemon=True,
            )
            process.start()
            self._ranks[rank] = process

    def watch(self, on_death: Callable[[str], None]) -> None:
        """Call `on_death` on a thread of its own, once, when a rank ends before `close`; then kill the others."""

        def wait() -> None:
            reasons = self._exit_reasons(None)
            if self._closing.is_set():
                return
            on_death(reasons)
            # A call that waits for them fails sooner.
            for process in self._ranks.values():
                process.kill()

        threading.Thread(target=wait, name="rank-watch", daemon=True).start()

    def why_lost(self, error: str) -> str:
        """Which rank ended, and how, when a call of all ranks fails with `error`; the exit may show after it."""
        return self._exit_reasons(DEATH_SECONDS) or error

    def _exit_reasons(self, timeout_s: float | None) -> str:
        """How the ranks that have ended did so, once one has; empty: none has within the timeout."""
        sentinels = connection.wait([process.sentinel for process in self._ranks.values()], timeout_s)
        with self._reaping:  # one thread gets a child's exit code; the process object keeps it for the others
            return ", ".join(_last_words(r, p) for r, p in self._ranks.items() if p.sentinel in sentinels)

    def close(self, *, graceful: bool) -> None:
        """End the ranks; `graceful`: they have been told to stop, and have `STOP_SECONDS` for it, all together."""
        self._closing.set()
        deadline = time.monotonic() + (STOP_SECONDS if graceful else 0.0)
        for process in self._ranks.values():
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()


def _run_rank(model: str, settings: EngineSettings, place: Place) -> None:
    """Be a rank other than 0 until rank 0 stops or is gone.

    Raises:
        PacelineError: the rank's share can't be loaded.
        Exception: the group has failed.
    """
    if threading.current_thread() is threading.main_thread():  # else signals are the caller's
        for number in stop_signals():
            signal.signal(number, signal.SIG_IGN)
    from paceline.engine.parallel.loading import serve_rank

    racing.warm_up()
    serve_rank(model, settings, place)


def _child(model: str, settings: EngineSettings, place: Place, parent: int, log_format: LogFormat) -> None:
    _end_with_parent(parent)
    log_to_stderr(f"rank {place.rank}: ", log_format)
    be_rank(model, settings, place)


def be_rank(model: str, settings: EngineSettings, place: Place) -> NoReturn:
    """Run a rank to the end of its process. The interpreter's shutdown is skipped: it may wait for a broken group."""
    code = 0
    try:
        _run_rank(model, settings, place)
    except PacelineError as error:
        logger.warning("can't serve: %s", error.message)
        time.sleep(REFUSAL_SECONDS)
        code = FAILURE
    except Exception:
        logger.exception("ended")
        code = FAILURE
    logging.shutdown()
    os._exit(code)


def _end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; elsewhere the broken group ends it."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(FAILURE)


def _last_words(rank: int, process: SpawnProcess) -> str:
    # The sentinel closes a moment before the exit code is there.
    process.join(REAP_SECONDS)
    return f"rank {rank} ended with {describe_exit(process.exitcode)}"
