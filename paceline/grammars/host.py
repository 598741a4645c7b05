"""`python -m paceline.grammars.host`: has a tokenizer's table, and forks a grammar worker for each connection.

Standard input has the vocabulary, standard output says in one line of JSON whether it could be read. The socket whose
number is the argument carries records. In come the id of a worker to fork, with the memory that it may take and a
connection, or of one to kill; out go ids of workers that have ended, with their exit codes and the seconds that they
computed. The host has one thread, since it forks. It ends, and every worker with it, when the socket is closed.
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
ENDED = struct.Struct("<qqd")


class _Host:
    def __init__(self, table: TokenTable, control: socket.socket) -> None:
        self._table = table
        self._control = control
        self._pids: dict[int, int] = {}
        """Workers that were not reaped, by process id: so long no other process can have the id."""
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
        """Wait for what comes next; False: the service is gone."""
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
        """Let go of what is the host's; what the library prints when it fails may quote the grammar."""
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
                self._control.sendall(ENDED.pack(worker, os.waitstatus_to_exitcode(status), computed_s))


def main() -> None:
    """Run the host."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    size, ends, fast = json.load(sys.stdin)
    try:
        table = TokenTable(Vocabulary(size, tuple(ends), fast))
    except PacelineError as error:
        _say({"error": error.message})
        return
    # Imported before the first fork, so that workers share it.
    import paceline.grammars.worker  # noqa: F401

    _say({})
    with suppress(BrokenPipeError, ConnectionResetError):
        _Host(table, control).run()


def _say(what: dict[str, str]) -> None:
    """Say it, and close standard input and output: nobody reads them any more."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)


if __name__ == "__main__":
    main()
