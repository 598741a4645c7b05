"""A service's end of its grammar host: starts it, has it fork and kill workers, hears how they ended."""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

from paceline.grammars.host import ENDED, RECORD
from paceline.protocol.errors import PeerUnavailable, Unsupported
from paceline.sampling.grammar import Vocabulary

_PIECE = ENDED.size << 10


class HostProcess:
    """A host that has its table, and what to wait on for it and its workers: `selector`.

    Raises:
        Unsupported: the library is not installed, or can't read the tokenizer.
        PeerUnavailable: the process ended before it was ready.
        OSError: there is no process to be had.
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
                self._process = _started(theirs)
            except OSError:
                self._close_files()
                raise
        said = self._tell(json.dumps([vocabulary.size, vocabulary.ends, vocabulary.fast]).encode())
        error = json.loads(said).get("error") if said else "ended while it started; the log has its last words"
        if error is not None:
            self.close()
            raise Unsupported(error) if said else PeerUnavailable(f"grammar host: {error}")

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def _tell(self, vocabulary: bytes) -> bytes:
        """What the host says to a vocabulary; nothing if it ended."""
        given, says = self._process.stdin, self._process.stdout
        assert given is not None
        assert says is not None
        with given, says, suppress(BrokenPipeError):
            given.write(vocabulary)
            given.close()
            return says.readline()
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

    def ended(self) -> Iterator[tuple[int, int, float]]:
        """Workers that have ended, with exit codes and seconds computed; call it when `control` can be read.

        Raises:
            EOFError: the host itself has ended.
        """
        piece = self.control.recv(_PIECE)
        if not piece:
            raise EOFError
        self._records += piece
        while len(self._records) >= ENDED.size:
            yield ENDED.unpack_from(self._records)
            del self._records[: ENDED.size]

    def wake(self) -> None:
        """Have `selector` return at once, if something waits on it."""
        with suppress(BlockingIOError):
            os.write(self._wake_write, b"\0")

    def awake(self) -> None:
        """Forget that it was woken."""
        with suppress(BlockingIOError):
            os.read(self._wake_read, _PIECE)

    def kill_host(self) -> None:
        """End it at once, and every worker with it; `ended` then says so."""
        self._process.kill()

    def close(self) -> None:
        """Let the host end, and every worker with it."""
        self._close_files()
        self._process.wait()

    def _close_files(self) -> None:
        self.selector.close()
        self.control.close()
        os.close(self._wake_read)
        os.close(self._wake_write)


def _started(control: socket.socket) -> subprocess.Popen[bytes]:
    """A host that is told of workers over `control`."""
    command = [sys.executable, "-m", "paceline.grammars.host", str(control.fileno())]
    # Allocators that give each thread a region of its own reserve more address space than a worker may have.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    return subprocess.Popen(  # noqa: S603
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[control.fileno()], env=environment
    )
