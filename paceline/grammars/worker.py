"""A grammar worker: follows one grammar for its sessions, and answers their requests in order.

| request | answer |
|---|---|
| `compile`: kind and text | `error`, if the library refuses it |
| `commit` and `paths` of a `session` | `taken`, `reached`, and the masks of the paths that are; or `error` |

A request may name sessions that have `left`. Every answer has the bytes of memory that the worker uses, and its CPU
seconds.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.grammars.wire import Frame, FrameReader, encode_frame
from paceline.protocol.errors import InvalidInput
from paceline.protocol.sampling import Grammar, GrammarKind
from paceline.sampling.grammar import COMPILING_STACK_BYTES, GrammarMatcher, TokenTable, Walk

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


OUT_OF_MEMORY = 77
"""Exit code of a worker whose own allocation failed; the library's ends it by SIGABRT."""
QUICK_S = 0.1
"""Compilations that take longer get a lower priority."""
_PIECE = 1 << 16


def run_worker(connection: socket.socket, table: TokenTable, memory_bytes: int) -> None:
    """Serve until the other side closes the connection."""
    confine(memory_bytes)
    worker, frames = _Worker(table), FrameReader()
    try:
        while piece := connection.recv(_PIECE):
            for request, _ in frames.feed(piece):
                connection.sendall(encode_frame(*worker.answer(request)))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


class _Worker:
    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._start: GrammarMatcher | None = None
        self._walks: dict[int, Walk] = {}
        self._resident = memory()[1]

    def answer(self, request: dict[str, Any]) -> Frame:
        """Answer a request."""
        allow_cpu(request["seconds"])
        for session in request.get("left", ()):
            self._walks.pop(session, None)
        payload = b""
        try:
            if "compile" in request:
                answer: dict[str, Any] = {}
                self._compile(Grammar(GrammarKind(request["compile"]), request["text"]))
            else:
                answer, payload = self._walk(request)
        except InvalidInput as error:
            answer = {"error": error.message, "facts": error.metadata}
        usage = {"bytes": max(0, memory()[1] - self._resident), "computed_s": time.process_time()}
        return {**answer, **usage}, payload

    def _compile(self, grammar: Grammar) -> None:
        """Compile, and compute the first allowed tokens: some grammars defer their work until then."""

        def compile_start() -> GrammarMatcher:
            start = self._table.compile(grammar)
            start.copy().next_token_mask()
            return start

        with ThreadPoolExecutor(1) as thread:
            compiling = thread.submit(compile_start)
            if wait([compiling], QUICK_S).not_done:
                step_back()
            self._start = compiling.result()

    def _walk(self, request: dict[str, Any]) -> Frame:
        if self._start is None:
            # The request was sent before the grammar was refused.
            return {"error": "grammar: refused", "facts": {}}, b""
        walk = self._walks.get(request["session"])
        if walk is None:
            walk = self._walks[request["session"]] = Walk(self._start.copy())
        accepted = walk.commit(request["commit"])
        if accepted < len(request["commit"]):
            return {"taken": accepted, "reached": []}, b""
        masks = walk.masks(request["paths"])
        reachable = [mask is not None for mask in masks]
        return {"taken": accepted, "reached": reachable}, b"".join(mask for mask in masks if mask is not None)
