"""A process beside the benchmark that answers one JSON object a line.

Its first line is `{"ready": …}`. It ends when its stdin closes, so it never outlives the benchmark.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Self

from paceline.protocol.errors import PacelineError
from paceline.runtime.process import reap

READY_SECONDS = 900.0
ANSWER_SECONDS = 300.0
STOP_SECONDS = 5.0
LOG_CHARACTERS = 400


class WorkerFailed(PacelineError):
    """A worker did not start, ended, hung or answered with an error."""


class WorkerProcess:
    """One worker, in a process group of its own; a context manager, ready once entered.

    Args:
        name: the worker's name in errors.
        command: the worker's argv.
        environment: the worker's whole environment; None: ours.
        log: file of the worker's stderr; None: our stderr.
        ready_s, answer_s: how long it may take; a worker that takes longer is killed.

    Raises (on entering):
        WorkerFailed: it ended or hung before it was ready.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        *,
        ready_s: float = READY_SECONDS,
        answer_s: float = ANSWER_SECONDS,
    ) -> None:
        self.name = name
        self.facts: Mapping[str, str] = {}
        self._command = list(command)
        self._environment = environment
        self._log = log
        self._ready_s, self._answer_s = ready_s, answer_s
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        self._child: subprocess.Popen[str] | None = None

    @classmethod
    def of_module(cls, module: str, *arguments: str) -> Self:
        """Return a worker that runs a module of ours by our interpreter."""
        return cls(module, [sys.executable, "-m", module, *arguments])

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(self._log.open("ab")) if self._log is not None else None
            self._child = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment,
                text=True,
                process_group=0,
            )
        threading.Thread(target=self._pump, name=f"{self.name} answers", daemon=True).start()
        try:
            self.facts = self._next(self._ready_s)["ready"]
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def processes(self) -> tuple[int, ...]:
        """Return the worker's process id, if it has been started."""
        return () if self._child is None else (self._child.pid,)

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return its answer.

        Raises:
            WorkerFailed: the worker answered with an error, ended, or hung; after the last two it is gone.
        """
        child = self._child
        assert child is not None and child.stdin is not None, "entered"
        try:
            child.stdin.write(json.dumps(request) + "\n")
            child.stdin.flush()
        except OSError as error:
            raise self._failure(f"takes no requests ({error})") from error
        message = self._next(self._answer_s)
        if "error" in message:
            raise self._failure(f"answered: {message['error']}")
        return message

    def close(self) -> None:
        """End the worker and all that it started; harmless if it has ended."""
        child = self._child
        if child is None:
            return
        if child.stdin is not None:
            with contextlib.suppress(OSError):
                child.stdin.close()
        reap(child, STOP_SECONDS)
        self._kill()

    def _pump(self) -> None:
        child = self._child
        assert child is not None and child.stdout is not None, "entered"
        with child.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    def _next(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout_s)
        except Empty:
            self._kill()
            raise self._failure(f"gave no answer in {timeout_s:g} s") from None
        if line is None:
            self.close()
            assert self._child is not None, "entered"
            raise self._failure(f"ended with exit code {self._child.returncode}")
        try:
            message = json.loads(line)
        except json.JSONDecodeError:
            message = None
        if not isinstance(message, dict):
            self._kill()
            raise self._failure(f"wrote {line[:LOG_CHARACTERS]!r} where an answer was due")
        return message

    def _kill(self) -> None:
        assert self._child is not None, "entered"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        reap(self._child, math.inf)

    def _failure(self, what: str) -> WorkerFailed:
        text = self._log.read_text(errors="replace") if self._log is not None and self._log.exists() else ""
        tail = text.strip()[-LOG_CHARACTERS:]
        return WorkerFailed(f"{self.name} {what}" + (f"; its last words: {tail}" if tail else ""))


def say(message: Mapping[str, Any]) -> None:
    """Write a line to the benchmark; called in a worker."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()
