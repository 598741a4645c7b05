"""A module of the benchmarks in a process of its own, which serves at an address until its stdin closes."""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType

STOP_SECONDS = 10.0


class Child:
    """`python -m MODULE ARGUMENTS`, whose first line on stdout is its host:port. A context manager.

    It ends when its stdin closes, so it never outlives the benchmark.

    Raises (on entering, and from `ask`):
        RuntimeError: it ended.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._command = [sys.executable, "-m", module, *arguments]
        self.address = ""

    def __enter__(self) -> Child:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )  # a module of ours
        self.address = self._line()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._process:
            assert self._process.stdin is not None, "a pipe"
            self._process.stdin.close()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def ask(self, line: str) -> str:
        """Send a line and return the line that answers it."""
        assert self._process.stdin is not None, "a pipe"
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None, "a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(self._command)} ended with {self._process.wait()}")
        return line.rstrip("\n")


def say(line: str) -> None:
    """In the child: tell the parent a line."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
