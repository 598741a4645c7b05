"""`python -m paceline.grammars.host`: keeps a tokenizer's table, and forks a grammar worker for each connection.

Standard input has the vocabulary. Standard output says in one line of JSON whether it could be read. The socket whose
number is the argument carries records. Records to the host name a worker to fork, with its memory limit and a
connection, or a worker to kill. Records from the host name a worker that has ended, with its exit code and CPU
seconds. The host has one thread, since it forks. It ends, and every worker with it, when the socket is closed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import sys
from contextlib import suppress

from paceline.protocol.errors import PacelineError
from paceline.sampling.grammar import TokenTable, Vocabulary

RECORD = struct.Struct("<qq")
EXIT = struct.Struct("<qqd")


class _Host:
    def __init__(self, table: TokenTable, control: socket.socket) -> None:
        self._table = table
        self._control = control
        self._pids: dict[int, int] = {}
        """Workers by process id. An id is dropped when it is reaped, since only then another process can get it."""
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        try:
            while self._serve():
                pass
        finally:
            for pid in self._pids:
                os.kill(pid, signal.SIGKILL)

    def _serve(self) -> bool:
        """Wait for the next record or exit. False: the service is gone."""
        ready, _, _ = select.select([self._control.fileno(), self._wake_read], [], [])
        if self._wake_read in ready:
            with suppress(BlockingIOError):
                os.read(self._wake_read, 1 << 10)
            self._reap()
        if self._control.fileno() not in ready:
            return True
        record, connections, _, _ = socket.recv_fds(self._control, RECORD.size, 1)
        if len(record) < RECORD.size:
            return False
        worker, memory_bytes = RECORD.unpack(record)
        if connections:
            self._fork(worker, memory_bytes, socket.socket(fileno=connections[0]))
        else:
            for pid, id_ in self._pids.items():
                if id_ == worker:
                    os.kill(pid, signal.SIGKILL)
        return True

    def _fork(self, worker: int, memory_bytes: int, connection: socket.socket) -> None:
        pid = os.fork()
        if pid:
            connection.close()
            self._pids[pid] = worker
            return
        code = 1
        try:
            self._become_worker()
            from paceline.grammars.worker import run_worker

            run_worker(connection, self._table, memory_bytes)
            code = 0
        finally:
            os._exit(code)

    def _become_worker(self) -> None:
        """Close the host's files, and discard standard error: the library's last words may quote the grammar."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._control.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 2)

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while True:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
                if not pid:
                    return
                worker, computed_s = self._pids.pop(pid), usage.ru_utime + usage.ru_stime
                self._control.sendall(EXIT.pack(worker, os.waitstatus_to_exitcode(status), computed_s))


def main() -> None:
    """Run the host."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    size, ends, fast = json.load(sys.stdin)
    try:
        table = TokenTable(Vocabulary(size, tuple(ends), fast))
    except PacelineError as error:
        _reply({"error": error.message})
        return
    # Imported before the first fork, so that workers share it.
    import paceline.grammars.worker  # noqa: F401

    _reply({})
    with suppress(BrokenPipeError, ConnectionResetError):
        _Host(table, control).run()


def _reply(reply: dict[str, str]) -> None:
    """Print the reply, and close standard input and output, which nobody uses any more."""
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)


if __name__ == "__main__":
    main()
