"""The HTTP server: one socket, TLS whose certificate can be renewed, a clean stop."""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import socket
import ssl
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import uvicorn

from paceline.protocol.errors import InvalidInput
from paceline.rpc.exposure import warn_if_exposed
from paceline.rpc.server import address_of
from paceline.rpc.tls import TlsFiles, TlsMaterial, server_credentials, server_files
from paceline.runtime.config import ServerSettings
from paceline.runtime.files import replace_text
from paceline.runtime.gateway_config import GatewayConfig
from paceline.runtime.stopping import signals_stop, stop_with_stdin
from paceline_gateway.http.connections import BoundedConnection, WaitingConnections
from paceline_gateway.http.guard import RunningRequests

logger = logging.getLogger(__name__)

BACKLOG = 2048
MOST_FILES = 1 << 20
OTHER_FILES = 128
"""Of the files that the process may open: what is not a client's connection."""


class _Server(uvicorn.Server):
    """Leaves signals to us: a second one ends the process at once, as every service of ours."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def open_socket(settings: ServerSettings, reader_timeout_s: float) -> socket.socket:
    """Listen, so that a port that is taken is refused before anything is loaded.

    Whoever takes nothing of what was written for `reader_timeout_s` loses the connection, where the system can do
    that (Linux): a closed connection, too, would hold what is left to send.

    Raises:
        InvalidInput: naming host:port.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listening = socket.create_server((settings.host.strip("[]"), settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        address = address_of(settings.host, settings.port)
        raise InvalidInput.of("server address", address, "a free host:port of this machine") from error
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit it
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(reader_timeout_s * 1e3))
    return listening


def file_limit() -> int:
    """Files that this process may open, raised as far as it may raise that itself."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


async def run_http(app: Any, config: GatewayConfig, listening: socket.socket, running: RunningRequests) -> None:
    """Serve until a signal, or the end of standard input where that counts; then drain and return.

    A draining server takes no connection. Responses that run have `drain_seconds`; what is left is cut off.

    Raises:
        InvalidInput: a TLS file is missing, or not what it should be.
    """
    settings = config.server
    server = _Server(uvicorn_config(app, config))
    address = address_of(settings.host, listening.getsockname()[1])
    stop = asyncio.Event()
    if settings.stop_with_stdin:
        stop_with_stdin(stop, settings.drain_seconds)
    with signals_stop(stop):
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        if settings.port_file is not None:
            replace_text(settings.port_file, address)
        logger.info("serving: address=%s tls=%s", address, settings.tls_certificate is not None)
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            logger.info("draining: drain_seconds=%g running=%d", settings.drain_seconds, running.count)
            running.draining = server.should_exit = True
            if settings.port_file is not None:
                settings.port_file.unlink(missing_ok=True)
            await serving
    logger.info("stopped: address=%s", address)


def uvicorn_config(app: Any, config: GatewayConfig) -> uvicorn.Config:
    """What uvicorn is told. Raises as `run_http`."""
    settings = config.server
    server_credentials(settings)  # checks the files, naming the one that is wrong
    files = server_files(settings)
    if settings.tls_certificate is None:
        warn_if_exposed(settings, "plaintext", "set server.tls_certificate and server.tls_key")
    waiting = WaitingConnections(config, file_limit() - OTHER_FILES)
    connection = partial(BoundedConnection, head_timeout_s=config.head_timeout_s, waiting=waiting)
    return uvicorn.Config(
        app,
        http=cast(Any, connection),
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # an address is a connection's own, whatever it says of itself
        server_header=False,
        timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
        ssl_ca_certs=str(settings.tls_client_ca) if settings.tls_client_ca else None,
        ssl_cert_reqs=ssl.CERT_REQUIRED if settings.tls_client_ca else ssl.CERT_NONE,
        ssl_context_factory=(lambda _, make: RenewedContext.of(files, make)) if settings.tls_certificate else None,
    )


class RenewedContext(ssl.SSLContext):
    """Stands for the context of the files as they are when a connection begins.

    A context of its own for each set of files: a session that another authority let in is not resumed.
    """

    _files: TlsFiles
    _make: Callable[[], ssl.SSLContext]
    _known: TlsMaterial
    _current: ssl.SSLContext

    @classmethod
    def of(cls, files: TlsFiles, make: Callable[[], ssl.SSLContext]) -> RenewedContext:
        """Over files that are right now.

        Args:
            files: which have been checked.
            make: the context of the files as they are when it is called.
        """
        context = cls(ssl.PROTOCOL_TLS_SERVER)
        context._files, context._make = files, make
        context._known, context._current = files.read(), make()
        return context

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        """Called once for each connection."""
        self._renew()
        return self._current.wrap_bio(*args, **options)

    def _renew(self) -> None:
        """Files that are replaced while they are read are read again at the next connection."""
        material = self._files.read()
        if material is self._known:
            return
        try:
            self._current = self._make()
        except OSError as error:
            logger.warning("TLS files have changed again, the last ones stay: error=%s", error)
            return
        self._known = material
