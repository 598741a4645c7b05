"""The gRPC server of all services: health, reflection, TLS, keepalive, limits, a clean stop."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from paceline.protocol.errors import InvalidInput, PeerUnavailable
from paceline.rpc.authorization import RoleInterceptor
from paceline.rpc.channel import Options, keepalive_options, message_options
from paceline.rpc.frames import first_to_end
from paceline.rpc.statuses import abort_with
from paceline.rpc.tls import server_credentials
from paceline.runtime import clock
from paceline.runtime.config import ServerSettings
from paceline.runtime.files import replace_text
from paceline.runtime.process import signals_stop, stop_with_stdin

logger = logging.getLogger(__name__)


def warn_if_exposed(settings: ServerSettings, what: str, remedy: str) -> None:
    """Warn if other machines can reach the server.

    Args:
        settings: where the server listens.
        what: what is unsafe, such as "plaintext" or "requests without a key".
        remedy: the settings that make it safe, such as "set server.tls_certificate and server.tls_key".
    """
    if not is_loopback(settings.host):
        logger.warning(
            "unsafe to expose: %s on server.host = %s, port %d; %s, or server.host = 127.0.0.1",
            what, settings.host, settings.port, remedy,
        )  # fmt: skip


def warn_of_callers(settings: ServerSettings) -> None:
    """Warn if anybody who reaches this server may use it; for servers that know callers by TLS alone."""
    if settings.tls_client_ca is None:
        warn_if_exposed(settings, "any caller may open sessions", "set server.tls_client_ca")
    elif settings.tls_roles == "off":
        what = "any certificate of server.tls_client_ca may open sessions"
        warn_if_exposed(settings, what, 'set server.tls_roles = "required"')


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address; of names, only `localhost` counts."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


MIN_PING_INTERVAL_MS = 500
"""Peers ping every 5 s; gRPC's default would cut them off for that."""
MAX_PENDING_CALLS = 1 << 20
"""Calls that may wait for the service, which refuses those without room with a status of ours. By default gRPC
cancels some calls beyond 1,000 and all beyond 3,000."""
MAX_CALLS = 8192
"""Most open calls, beside those that a service admits by its own limit: each takes 28 KiB (measured), so all take
230 MiB. gRPC refuses further ones with RESOURCE_EXHAUSTED and no hint."""

LOADING_RETRY_MS = 200
"""Hint to retry while the service loads; callers wait longer with each try, since loading takes seconds."""

Hook = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class RunningServer:
    """The ports of a server once it is bound."""

    port: int
    health_port: int | None


async def run_server(
    settings: ServerSettings,
    register: Callable[[grpc.aio.Server], Awaitable[None] | None],
    service_names: Sequence[str],
    stop: asyncio.Event | None = None,
    on_drain: Hook | None = None,
    on_serving: Callable[[RunningServer], None] | None = None,
    loading: str = "the service is still loading",
    most_calls: int = MAX_CALLS,
) -> None:
    """Serve until a signal, `stop`, or, with `stop_with_stdin`, the end of standard input; then drain and return.

    The health service answers NOT_SERVING from the start, SERVING once
    `register` has returned, and NOT_SERVING again while the server drains.
    Until `register` has returned, every other call is refused as UNAVAILABLE
    with `loading`, the time since the start, and a hint when to retry; a stop cancels `register`.
    A draining server sends GOAWAY: running calls go on, new ones go to another address or are UNAVAILABLE.

    Args:
        settings: address, ports and TLS; `port_file` gets `host:port` once SERVING.
        register: loads what the service needs and adds its servicers to the server; sync or async.
        service_names: full names (`paceline.v1.TargetService`) for health and reflection.
        stop: ends the server when set, beside the signals.
        on_drain: called when draining begins; returns when no work is left. The remaining
            calls are cancelled then, and in any case after `drain_seconds`. None: calls
            get `drain_seconds` to end by themselves.
        on_serving: called with the bound ports once SERVING.
        loading: says which service is loading what.
        most_calls: most open calls; gRPC refuses further ones.

    Raises:
        InvalidInput: a port is taken (names host:port), or a TLS file is missing or wrong.
    """
    stop = stop or asyncio.Event()
    gate = _LoadingGate(loading)
    interceptors = _interceptors(settings)
    server = grpc.aio.server(interceptors=interceptors, options=_options(), maximum_concurrent_rpcs=most_calls)
    server.add_generic_rpc_handlers((gate,))
    credentials = server_credentials(settings)
    port = _bind(server, settings.host, settings.port, credentials)
    if credentials is None:
        warn_if_exposed(settings, "plaintext", "set server.tls_certificate and server.tls_key")
    servicer = health.aio.HealthServicer()
    names = ("", *service_names)
    await _set_health(servicer, names, health_pb2.HealthCheckResponse.NOT_SERVING)
    if settings.stop_with_stdin:
        stop_with_stdin(stop, settings.drain_seconds)
    with signals_stop(stop):
        probe, health_port = await _start_probe(settings, servicer)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        await server.start()
        try:
            if await _load(server, register, stop):
                _reflect(server, service_names)
                gate.open = True
                await _set_health(servicer, names, health_pb2.HealthCheckResponse.SERVING)
                _announce(settings, RunningServer(port, health_port), service_names, on_serving)
                await stop.wait()
        finally:
            await _set_health(servicer, names, health_pb2.HealthCheckResponse.NOT_SERVING)
            await _drain(server, settings.drain_seconds, on_drain)
            if probe is not None:
                await probe.stop(None)
            if settings.port_file is not None:
                settings.port_file.unlink(missing_ok=True)
    logger.info("stopped: services=%s port=%d", ",".join(service_names), port)


def address_of(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


class _LoadingGate(grpc.GenericRpcHandler):
    """Refuses calls of services that are still loading; health and reflection pass."""

    def __init__(self, loading: str) -> None:
        self.open = False
        self._loading = loading
        self._began = clock.now()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """gRPC asks its handlers in order; None passes the call on to the next."""
        if self.open or handler_call_details.method.startswith("/grpc."):
            return None
        return grpc.stream_stream_rpc_method_handler(self._refuse)

    async def _refuse(self, _: Any, context: Any) -> None:
        seconds = clock.now() - self._began
        message = f"{self._loading} ({seconds:.0f} s so far); trying again is safe"
        facts = {"loading": self._loading, "seconds": f"{seconds:.1f}"}
        await abort_with(context, PeerUnavailable(message, metadata=facts, retry_after_ms=LOADING_RETRY_MS))


class _ParseInterceptor(grpc.aio.ServerInterceptor):
    """Refuses bytes that are no message as `InvalidInput`; gRPC's default is UNKNOWN and a logged stack for each.

    Unary methods, all of them coroutines, are not called then; a method that
    reads a stream gets the error from its read.
    """

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """The call's handler with our parser of its requests."""
        handler = await continuation(details)
        if handler is None or handler.request_deserializer is None:
            return handler
        parse = partial(_parse, handler.request_deserializer)
        if handler.request_streaming:
            return handler._replace(request_deserializer=parse)
        kind = "unary_stream" if handler.response_streaming else "unary_unary"
        method = getattr(handler, kind)

        async def call_method(request: bytes, context: Any) -> Any:
            try:
                message = parse(request)
            except InvalidInput as error:
                await abort_with(context, error)
            return await method(message, context)

        return handler._replace(request_deserializer=None, **{kind: call_method})


def _parse(deserialize: Callable[[bytes], Any], request: bytes) -> Any:
    try:
        return deserialize(request)
    except DecodeError as error:
        raise InvalidInput.of("request", f"{len(request)} bytes", f"a message of its method ({error})") from error


class _LateServer:
    """Takes servicers after the server has started, when gRPC takes generic handlers only."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Called first by the generated code; serves every method."""
        self._server.add_generic_rpc_handlers(tuple(handlers))

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """Called second: a fast path that exists only before the start."""


async def _load(
    server: grpc.aio.Server,
    register: Callable[[grpc.aio.Server], Awaitable[None] | None],
    stop: asyncio.Event,
) -> bool:
    """Run `register`; False if `stop` came first."""
    loading = register(_LateServer(server))  # type: ignore[arg-type]  # all that generated code calls
    return loading is None or await first_to_end(loading, stop.wait())


def _options() -> Options:
    return [
        *message_options(),
        *keepalive_options(),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        # Two servers on one port would share its connections at random: refuse the second.
        ("grpc.so_reuseport", 0),
    ]


def _bind(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
    address = address_of(host, port)
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise InvalidInput.of("server address", address, "a free host:port of this machine") from error


def _interceptors(settings: ServerSettings) -> tuple[grpc.aio.ServerInterceptor, ...]:
    """The interceptors in the order in which a call passes them."""
    if settings.tls_client_ca is None or settings.tls_roles == "off":
        return (_ParseInterceptor(),)
    return RoleInterceptor(), _ParseInterceptor()


async def _start_probe(
    settings: ServerSettings, servicer: health.aio.HealthServicer
) -> tuple[grpc.aio.Server | None, int | None]:
    """Open the plaintext port for probes without certificates: health alone, up while models load."""
    if settings.health_port is None:
        return None, None
    probe = grpc.aio.server(interceptors=(_ParseInterceptor(),), options=_options())
    port = _bind(probe, settings.host, settings.health_port, None)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, probe)
    await probe.start()
    return probe, port


def _reflect(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    # Services have the `engine` extra; a client's installation has no reflection and needs none.
    from grpc_reflection.v1alpha import reflection

    names = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, _LateServer(server))


async def _set_health(servicer: health.aio.HealthServicer, names: Sequence[str], status: Any) -> None:
    for name in names:
        await servicer.set(name, status)


def _announce(
    settings: ServerSettings,
    running: RunningServer,
    service_names: Sequence[str],
    on_serving: Callable[[RunningServer], None] | None,
) -> None:
    address = address_of(settings.host, running.port)
    if settings.port_file is not None:
        replace_text(settings.port_file, address)
    if on_serving is not None:
        on_serving(running)
    logger.info(
        "serving: services=%s address=%s health_port=%s", ",".join(service_names), address, running.health_port
    )


async def _drain(server: grpc.aio.Server, seconds: float, on_drain: Hook | None) -> None:
    """Refuse new calls, let the running ones end, and cancel the rest."""
    logger.info("draining: drain_seconds=%g", seconds)
    began = clock.now()
    stopping = asyncio.ensure_future(server.stop(seconds))
    if on_drain is not None:
        drain_task = asyncio.ensure_future(on_drain())
        await asyncio.wait([drain_task, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not drain_task.done() and clock.now() - began >= seconds:
            logger.warning("drain_seconds = %g are over: sessions that still run are cut off", seconds)
        drain_task.cancel()
        results = await asyncio.gather(drain_task, return_exceptions=True)
        if isinstance(results[0], Exception):
            logger.error("draining failed: error=%r", results[0])
        await server.stop(None)
    await stopping
