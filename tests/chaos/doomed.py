"""A client in a process of its own, to be killed in the middle of its text.

`python -m tests.chaos.doomed grpc|http HOST:PORT` streams a long text once it is told to on its standard input, and
writes a line for each message that has come.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import TracebackType

from paceline.client import Client
from paceline.protocol.generation import GenerateRequest, Tokens

GRPC, HTTP = "grpc", "http"
LENGTH = 1500
"""Nine seconds and more of rounds: it is under way whenever it is killed."""
PROMPT = (7, 70, 170)
BEGIN_SECONDS = 60.0
END_SECONDS = 20.0


class DoomedClient:
    """The process, from outside; a context manager, at whose end it is gone. `way`: `GRPC` or `HTTP`."""

    def __init__(self, way: str, address: str) -> None:
        command = [sys.executable, "-m", "tests.chaos.doomed", way, address]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._streams = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> DoomedClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        self._process.kill()
        self._reader.join(END_SECONDS)
        with self._process:
            """Which closes its pipes."""

    def begin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        assert self._streams.wait(BEGIN_SECONDS), "the client that is to be killed has a text"

    def kill(self) -> None:
        assert self._process.poll() is None, "its text has not ended"
        self._process.kill()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for _ in self._process.stdout:
            self._streams.set()


def _over_grpc(address: str) -> Iterator[str]:
    request = GenerateRequest(token_ids=PROMPT, seed=1, max_new_tokens=LENGTH, ignore_eos=True)
    with Client(address) as client:
        yield from (event.text for event in client.stream(request) if isinstance(event, Tokens))


def _over_http(address: str) -> Iterator[str]:
    body = {"prompt": PROMPT, "seed": 1, "max_tokens": LENGTH, "ignore_eos": True, "stream": True}
    connection = http.client.HTTPConnection(address)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    yield from (line.decode() for line in connection.getresponse() if line.startswith(b"data: "))


def main(way: str, address: str) -> None:
    sys.stdin.readline()
    for _ in (_over_grpc if way == GRPC else _over_http)(address):
        print(flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
