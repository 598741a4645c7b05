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
from paceline.rpc.server import address_of, warn_if_exposed
from paceline.rpc.tls import TlsFiles, TlsMaterial, server_credentials, server_files
from paceline.runtime.config import ServerSettings
from paceline.runtime.files import replace_text
from paceline.runtime.gateway_config import GatewayConfig
from paceline.runtime.process import signals_stop, stop_with_stdin
from paceline_gateway.http.connections import BoundedConnection, WaitingConnections
from paceline_gateway.http.guard import RunningRequests

logger = logging.getLogger(__name__)

BACKLOG = 2048
MAX_FILES = 1 << 20
RESERVED_FILES = 128
"""Files that the process may open for other things than clients' connections."""


class _Server(uvicorn.Server):
    """A server that leaves signals to us: a second one ends the process at once, as with every service of ours."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def open_socket(settings: ServerSettings, reader_timeout_s: float) -> socket.socket:
    """Listen, so that a port in use is refused before anything is loaded.

    On Linux a client that takes nothing for `reader_timeout_s` loses the connection: even a closed connection would
    hold what is left to send.

    Raises:
        InvalidInput: naming host:port.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listener = socket.create_server((settings.host.strip("[]"), settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        address = address_of(settings.host, settings.port)
        raise InvalidInput.of("server address", address, "a free host:port of this machine") from error
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit it
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(reader_timeout_s * 1e3))
    return listener


def file_limit() -> int:
    """Raise the number of files that this process may open as far as it can, and return it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


async def run_http(
    app: Any, config: GatewayConfig, listener: socket.socket, running_requests: RunningRequests
) -> None:
    """Serve until a signal comes, or standard input ends where that counts; then drain and return.

    A draining server takes no connection. Responses that run have `drain_seconds`, and are then cut off.

    Raises:
        InvalidInput: a TLS file is missing, or not what it should be.
    """
    settings = config.server
    server = _Server(uvicorn_config(app, config))
    address = address_of(settings.host, listener.getsockname()[1])
    stop = asyncio.Event()
    if settings.stop_with_stdin:
        stop_with_stdin(stop, settings.drain_seconds)
    with signals_stop(stop):
        server_task = asyncio.create_task(server.serve(sockets=[listener]))
        if settings.port_file is not None:
            replace_text(settings.port_file, address)
        logger.info("serving: address=%s tls=%s", address, settings.tls_certificate is not None)
        stop_task = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((server_task, stop_task), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop_task.cancel()
            logger.info("draining: drain_seconds=%g running=%d", settings.drain_seconds, running_requests.count)
            running_requests.is_draining = server.should_exit = True
            if settings.port_file is not None:
                settings.port_file.unlink(missing_ok=True)
            await server_task
    logger.info("stopped: address=%s", address)


def uvicorn_config(app: Any, config: GatewayConfig) -> uvicorn.Config:
    """Build uvicorn's configuration. Raises as `run_http`."""
    settings = config.server
    server_credentials(settings)  # checks the files, naming the one that is wrong
    files = server_files(settings)
    if settings.tls_certificate is None:
        warn_if_exposed(settings, "plaintext", "set server.tls_certificate and server.tls_key")
    waiting_connections = WaitingConnections(config, file_limit() - RESERVED_FILES)
    connection = partial(
        BoundedConnection, head_timeout_s=config.head_timeout_s, waiting_connections=waiting_connections
    )
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
    """A TLS context that follows its files: a connection has those of its beginning.

    Each set of files has a context of its own, so a TLS session that another authority let in is not resumed.
    """

    _files: TlsFiles
    _make: Callable[[], ssl.SSLContext]
    _material: TlsMaterial
    _context: ssl.SSLContext

    @classmethod
    def of(cls, files: TlsFiles, make: Callable[[], ssl.SSLContext]) -> RenewedContext:
        """Build the context over files that are right now.

        Args:
            files: the files, which have been checked.
            make: builds the context of the files as they are when it is called.
        """
        context = cls(ssl.PROTOCOL_TLS_SERVER)
        context._files, context._make = files, make
        context._material, context._context = files.read(), make()
        return context

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        """Begin one connection."""
        self._renew()
        return self._context.wrap_bio(*args, **options)

    def _renew(self) -> None:
        """Read the files again if they have changed; a reading that fails is tried again at the next connection."""
        material = self._files.read()
        if material is self._material:
            return
        try:
            self._context = self._make()
        except OSError as error:
            logger.warning("TLS files have changed again, the last ones stay: error=%s", error)
            return
        self._material = material
