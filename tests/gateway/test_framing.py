"""What is neither a head of usual size nor a body: trailers, frames of chunks, heads read at once, requests ahead."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import closing, suppress

import psutil
import pytest

from paceline_gateway.http.connections import MAX_HEAD_BYTES, MAX_PIPELINED_REQUESTS
from tests.e2e.cluster import eventually
from tests.gateway.test_connections import HEAD, LAST, POST, SlowApp, all_of, opened, served

CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
LAST_CHUNKED = CHUNKED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
GROWN_BYTES = 16 << 20
FLOOD_BYTES = 30 << 20
MOST_SENT = 8 << 20
"""What the system's sockets of both sides may hold of what nobody reads."""


@pytest.fixture(scope="module")
def app() -> SlowApp:
    return SlowApp()


@pytest.fixture(scope="module")
def port(app: SlowApp) -> Iterator[int]:
    with served(app, head_timeout_s=30) as at:
        yield at


def answer(port: int, sent: bytes) -> bytes:
    """All that comes back on a connection of its own; the client sends nothing more."""
    with closing(opened(port)) as connection:
        with suppress(ConnectionError):
            connection.sendall(sent)
        return all_of(connection)


def honest(port: int) -> bool:
    """Whether the next request is answered."""
    return answer(port, LAST).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("begins", "repeated"),
    [
        (CHUNKED + b"0\r\n", b"a:b\r\n" * 13_000),
        (CHUNKED + b"1\r\nx\r\n0\r\na:", b"b" * 65_536),
        (CHUNKED + b"1;", b"a" * 65_536),
        (HEAD, b"a: " + b"b" * 9000 + b"\r\n"),
        (HEAD + b"a:", b"b" * 65_536),
        (b"GET /", b"b" * 65_536),
    ],
    ids=["trailers", "a trailer", "an extension of a chunk", "headers", "a header", "a path"],
)
def test_what_frames_a_body_has_a_size(
    port: int, begins: bytes, repeated: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    process, sent = psutil.Process(), 0
    before, began = process.memory_info().rss, time.monotonic()
    with closing(opened(port)) as connection:
        connection.sendall(begins)
        with pytest.raises(ConnectionError):
            while sent < FLOOD_BYTES:
                connection.sendall(repeated)
                sent += len(repeated)
    assert sent < MOST_SENT
    assert process.memory_info().rss - before < GROWN_BYTES
    assert time.monotonic() - began < 5
    eventually(lambda: f"longer than {MAX_HEAD_BYTES} bytes" in caplog.text, "the connection is dropped")
    assert honest(port)


@pytest.mark.parametrize("size", [MAX_HEAD_BYTES, MAX_HEAD_BYTES + 1])
def test_a_head_that_is_read_at_once_has_the_same_size(port: int, size: int) -> None:
    """The connection's first read may have all of it: 256 KiB."""
    begins, ends = HEAD + b"Connection: close\r\na: ", b"\r\n\r\n"
    received = answer(port, begins + b"b" * (size - len(begins) - len(ends)) + ends)
    assert received.startswith(b"HTTP/1.1 200") == (size <= MAX_HEAD_BYTES)


@pytest.mark.parametrize("size", [1, 100_000])
def test_chunks_and_short_trailers_are_taken(port: int, size: int) -> None:
    chunk = b"%x;name=value\r\n%b\r\n" % (size, b"x" * size)
    received = answer(port, LAST_CHUNKED + chunk * 3 + b"0\r\nAuthorization: x\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 200")
    assert received.endswith(b"\r\n\r\n" + b"x" * 3 * size)


def test_trailers_are_no_headers(port: int, app: SlowApp) -> None:
    app.may_end.set()
    answer(port, LAST_CHUNKED.replace(b" / ", b" /slow ") + b"0\r\nx-api-key: another\r\n\r\n")
    assert b"x-api-key" not in dict(app.headers)


@pytest.mark.parametrize("ahead", [MAX_PIPELINED_REQUESTS, 50 * MAX_PIPELINED_REQUESTS])
def test_few_requests_wait_behind_one_that_runs(port: int, app: SlowApp, ahead: int) -> None:
    app.may_end.clear()
    with closing(opened(port)) as connection:
        connection.sendall(HEAD.replace(b" / ", b" /slow ") + b"\r\n")
        assert connection.recv(12) == b"HTTP/1.1 200"
        with suppress(ConnectionError):
            connection.sendall((HEAD + b"\r\n") * (ahead - 1) + LAST)
        if ahead == MAX_PIPELINED_REQUESTS:
            app.may_end.set()
        received = all_of(connection)
    assert received.count(b"HTTP/1.1 200") == (ahead if ahead == MAX_PIPELINED_REQUESTS else 0)
    app.may_end.set()
    assert honest(port)
