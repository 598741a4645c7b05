"""A service's end of its grammar host: starts it, has it fork and kill workers, and reads how they ended."""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

from paceline.grammars.host import EXIT, RECORD
from paceline.protocol.errors import PeerUnavailable, Unsupported
from paceline.sampling.grammar import Vocabulary

_PIECE = EXIT.size << 10


class HostProcess:
    """A running host. `selector` waits for the host and its workers.

    Raises:
        Unsupported: the library is not installed, or can't read the tokenizer.
        PeerUnavailable: the process ended before it was ready.
        OSError: the process can't be started.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.control, theirs = socket.socketpair()
        self._records = bytearray()
        self.selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for file in (self.control, self._wake_read):
            self.selector.register(file, selectors.EVENT_READ)
        with theirs:
            try:
                self._process = _start(theirs)
            except OSError:
                self._close_files()
                raise
        reply = self._tell(json.dumps([vocabulary.size, vocabulary.ends, vocabulary.fast]).encode())
        error = json.loads(reply).get("error") if reply else "ended while it started; the log has its last words"
        if error is not None:
            self.close()
            raise Unsupported(error) if reply else PeerUnavailable(f"grammar host: {error}")

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def _tell(self, vocabulary: bytes) -> bytes:
        """Send the vocabulary; returns the host's reply, empty if it ended."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with stdin, stdout, suppress(BrokenPipeError):
            stdin.write(vocabulary)
            stdin.close()
            return stdout.readline()
        return b""

    def fork(self, worker: int, memory_bytes: int) -> socket.socket:
        """Have a worker forked; returns the connection to it.

        Raises:
            OSError: the host has ended.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            socket.send_fds(self.control, [RECORD.pack(worker, memory_bytes)], [theirs.fileno()])
        return ours

    def kill(self, worker: int) -> None:
        """End a worker; harmless if it has ended."""
        with suppress(OSError):
            self.control.sendall(RECORD.pack(worker, 0))

    def exits(self) -> Iterator[tuple[int, int, float]]:
        """Workers that have ended, with exit code and CPU seconds. Call it when `control` is readable.

        Raises:
            EOFError: the host itself has ended.
        """
        piece = self.control.recv(_PIECE)
        if not piece:
            raise EOFError
        self._records += piece
        while len(self._records) >= EXIT.size:
            yield EXIT.unpack_from(self._records)
            del self._records[: EXIT.size]

    def wake(self) -> None:
        """Make a wait on `selector` return at once."""
        with suppress(BlockingIOError):
            os.write(self._wake_write, b"\0")

    def awake(self) -> None:
        """Clear the wake-up of `wake`."""
        with suppress(BlockingIOError):
            os.read(self._wake_read, _PIECE)

    def kill_host(self) -> None:
        """End the host at once, and every worker with it; `exits` then raises EOFError."""
        self._process.kill()

    def close(self) -> None:
        """End the host, and every worker with it."""
        self._close_files()
        self._process.wait()

    def _close_files(self) -> None:
        self.selector.close()
        self.control.close()
        os.close(self._wake_read)
        os.close(self._wake_write)


def _start(control: socket.socket) -> subprocess.Popen[bytes]:
    """Start a host that reads its records from `control`."""
    command = [sys.executable, "-m", "paceline.grammars.host", str(control.fileno())]
    # Allocators that give each thread a region of its own reserve more address space than a worker may have.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    return subprocess.Popen(  # noqa: S603
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[control.fileno()], env=environment
    )
