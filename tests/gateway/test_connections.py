"""Connections that send no whole head of a request, and certificates that are renewed, before a real server."""

from __future__ import annotations

import asyncio
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from paceline.local.certificates import Authority
from paceline.runtime.gateway_config import GatewayConfig
from paceline.runtime.roles import PeerRole
from paceline_gateway.http.connections import MAX_HEAD_BYTES
from paceline_gateway.http.guard import RunningRequests
from paceline_gateway.http.server import open_socket, run_http, uvicorn_config
from tests.e2e.cluster import eventually

HEAD = b"GET / HTTP/1.1\r\nHost: h\r\n"
LAST = HEAD + b"Connection: close\r\n\r\n"
POST = HEAD.replace(b"GET", b"POST")
LIMIT_S = 0.3
HOUR = timedelta(hours=1)


class SlowApp:
    """Answers with the body that it was sent, after a while where the path is /slow; at /early without reading it.

    At /block the whole server waits.
    """

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.headers: Any = ()
        """Of the last request, at its end."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == "/early":
            await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
            return
        if scope["path"] == "/block":
            time.sleep(LIMIT_S / 2)  # noqa: ASYNC251  that is what is wanted
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]}
        )
        if scope["path"] == "/slow":
            await asyncio.to_thread(self.may_end.wait, 10)
        await send({"type": "http.response.body", "body": body})
        self.headers = scope["headers"]


@contextmanager
def served(app: Any, **settings: Any) -> Iterator[int]:
    """The server over an app; yields its port."""
    server_settings = {"port": 0, "drain_seconds": 0, **settings.pop("server", {})}
    config = GatewayConfig.model_validate({"server": server_settings, "head_timeout_s": LIMIT_S, **settings})
    listening = open_socket(config.server, config.reader_timeout_s)
    server = uvicorn.Server(uvicorn_config(app, config))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        eventually(lambda: server.started, "the server serves")
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def app() -> SlowApp:
    return SlowApp()


@pytest.fixture(scope="module")
def port(app: SlowApp) -> Iterator[int]:
    with served(app) as at:
        yield at


def opened(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def all_of(connection: socket.socket) -> bytes:
    """Everything that comes until the server ends it, in whatever way."""
    received = b""
    with suppress(ConnectionError):
        while piece := connection.recv(1 << 16):
            received += piece
    return received


def ended(connection: socket.socket) -> bool:
    """Whether the server ends it, within the socket's time."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_half_a_head_is_not_waited_for(port: int) -> None:
    began = time.monotonic()
    with ExitStack() as stack:
        connections = [stack.enter_context(closing(opened(port))) for _ in range(4)]
        for connection, sent in zip(connections, (b"", b"GET / HT", HEAD, b"\r\n"), strict=True):
            connection.sendall(sent)
        assert all(ended(connection) for connection in connections)
    assert LIMIT_S <= time.monotonic() - began + 0.1 < 5


def test_a_head_that_trickles_in_is_not_waited_for_either(port: int) -> None:
    with closing(opened(port)) as connection, pytest.raises(OSError, match=r"reset|[Bb]roken pipe"):
        for _ in range(200):
            connection.sendall(b"G")
            time.sleep(LIMIT_S / 10)


def test_behind_a_reply_the_next_head_has_its_own_time(port: int) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        for _ in range(3):
            assert echoes(connection, b"body")
            time.sleep(LIMIT_S / 2)
        connection.sock.sendall(b"\r\n")
        assert ended(connection.sock), "an empty line is no request"


def test_a_body_may_take_longer_than_a_head(port: int) -> None:
    with closing(opened(port)) as connection:
        connection.sendall(POST + b"Connection: close\r\nContent-Length: 4\r\n\r\n12")
        time.sleep(2 * LIMIT_S)
        connection.sendall(b"34")
        assert all_of(connection).endswith(b"\r\n\r\n1234")


def test_a_body_whose_request_is_answered_may_be_sent(port: int) -> None:
    size = 20 * MAX_HEAD_BYTES
    with closing(opened(port)) as connection:
        connection.sendall(POST.replace(b" / ", b" /early ") + b"Content-Length: %d\r\n\r\n" % size)
        assert connection.recv(12) == b"HTTP/1.1 413"
        for _ in range(20):
            connection.sendall(b"x" * MAX_HEAD_BYTES)
        connection.sendall(LAST)
        assert b"HTTP/1.1 200" in all_of(connection)


def test_the_last_piece_of_such_a_body_is_no_head_however_large(port: int) -> None:
    """It comes in one piece where the server had no time to read for a while."""
    piece = 2 * MAX_HEAD_BYTES
    with closing(opened(port)) as connection, closing(opened(port)) as other:
        connection.sendall(POST.replace(b" / ", b" /early ") + b"Content-Length: %d\r\n\r\n" % (1 + piece))
        assert connection.recv(12) == b"HTTP/1.1 413"
        connection.sendall(b"x")
        time.sleep(LIMIT_S / 10)
        other.sendall(HEAD.replace(b" / ", b" /block "))
        other.sendall(b"\r\n")
        time.sleep(LIMIT_S / 10)
        connection.sendall(b"x" * piece)
        connection.sendall(LAST)
        assert b"HTTP/1.1 200" in all_of(connection)


def test_a_reply_that_runs_is_finished_whatever_comes_behind_its_request(port: int, app: SlowApp) -> None:
    app.may_end.clear()
    with closing(opened(port)) as connection:
        connection.sendall(HEAD.replace(b" / ", b" /slow ") + b"\r\n" + b"GET / HT")
        assert connection.recv(12) == b"HTTP/1.1 200"
        time.sleep(2 * LIMIT_S)
        app.may_end.set()
        connection.sendall(b"TP/1.1\r\nConnection: close\r\n\r\n")
        assert all_of(connection).count(b"HTTP/1.1 200") == 1, "the second reply"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    made = Authority.in_folder(tmp_path)
    made.issue_role(PeerRole.COORDINATOR, lifetime=HOUR).write(tmp_path, "server")
    made.issue_role(PeerRole.CLIENT, lifetime=HOUR).write(tmp_path, "client")
    return made


def https(folder: Path, *, mutual: bool = False) -> dict[str, Any]:
    own = {"tls_certificate": str(folder / "server.crt"), "tls_key": str(folder / "server.key")}
    return own | ({"tls_client_ca": str(folder / "ca.crt")} if mutual else {})


def certificate_at(port: int) -> str:
    """What a new connection is shown."""
    return ssl.get_server_certificate(("127.0.0.1", port), timeout=10)


def secured(port: int, folder: Path, name: str = "") -> http.client.HTTPSConnection:
    """A connection that trusts the authority, with a certificate of that name if one is named."""
    context = ssl.create_default_context(cafile=folder / "ca.crt")
    context.check_hostname = False
    if name:
        context.load_cert_chain(folder / f"{name}.crt", folder / f"{name}.key")
    return http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=context)


def echoes(connection: http.client.HTTPConnection, body: bytes) -> bool:
    connection.request("POST", "/", body)
    return connection.getresponse().read() == body


def test_a_new_certificate_is_shown_to_new_connections(tmp_path: Path, authority: Authority) -> None:
    with served(SlowApp(), server=https(tmp_path)) as port, closing(secured(port, tmp_path)) as open_:
        assert echoes(open_, b"one")
        old = certificate_at(port)
        assert certificate_at(port) == old
        renewed = authority.issue_role(PeerRole.COORDINATOR, lifetime=HOUR)
        (tmp_path / "server.crt").write_bytes(renewed.certificate)
        assert certificate_at(port) == old, "its key isn't there yet"
        (tmp_path / "server.key").write_bytes(renewed.key)
        assert certificate_at(port) != old
        assert echoes(open_, b"two")
        (tmp_path / "server.key").unlink()
        assert certificate_at(port) != old, "the last ones that were right stay"


def answered(port: int, folder: Path, name: str) -> bool:
    with closing(secured(port, folder, name)) as connection:
        try:
            return echoes(connection, b"x")
        except OSError:
            return False


def test_a_new_authority_of_clients_holds_from_the_next_connection_on(tmp_path: Path, authority: Authority) -> None:
    successor = Authority.create("the next CA")
    successor.issue("next", uris=(PeerRole.CLIENT.uri(),)).write(tmp_path, "next")
    with served(SlowApp(), server=https(tmp_path, mutual=True)) as port:
        assert [answered(port, tmp_path, name) for name in ("client", "next")] == [True, False]
        ca = tmp_path / "ca.crt"
        ca.write_bytes(ca.read_bytes() + successor.own.certificate)
        assert [answered(port, tmp_path, name) for name in ("client", "next")] == [True, True]


async def test_a_gateway_that_is_cancelled_lets_its_replies_end() -> None:
    config = GatewayConfig(server={"port": 0})
    listening = open_socket(config.server, config.reader_timeout_s)
    app = SlowApp()
    serving = asyncio.create_task(run_http(app, config, listening, RunningRequests()))
    reader, writer = await asyncio.open_connection(*listening.getsockname())
    writer.write(b"POST /slow HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: 5\r\n\r\nwhole")
    await reader.readuntil(b"\r\n\r\n")
    serving.cancel()
    await asyncio.sleep(0)
    app.may_end.set()
    assert await reader.read() == b"whole"
    writer.close()
    with pytest.raises(asyncio.CancelledError):
        await serving
