"""A cluster of table models with a gateway in front of it, and a client of plain sockets."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from paceline.local.service_process import Flags
from tests.e2e.cluster import Cluster, free_port

MODEL = "table:vocab=300,seed=1,max_length=30000,max_kv_rows=200000"
"""Text is bytes, and end token 256 hardly ever comes. Long enough for a text that outlasts any test."""
LONG = 20_000
WAIT_S = 20.0


class GatewayCluster(Cluster):
    """A cluster and its gateway, on a port that is known beforehand."""

    def __init__(
        self, folder: Path, gateway_flags: Flags | None = None, target_model: str = MODEL, **options: Any
    ) -> None:
        options.setdefault("drafters", ())
        super().__init__(folder, target_model=target_model, **options)
        self.http_port = free_port()
        self._gateway_flags = gateway_flags or {}

    def start_all(self) -> None:
        super().start_all()
        self.start_gateway("gateway", self.http_port)

    def start_gateway(self, label: str, port: int, flags: Flags | None = None) -> None:
        own: Flags = {"model": self.target_model, "coordinator.address": self.address, "server.port": port}
        self.start(label, "gateway", own | self._gateway_flags | (flags or {}))
        self.await_serving(label)

    @contextmanager
    def further_gateway(self, label: str, flags: Flags | None = None) -> Iterator[str]:
        """A gateway beside the first, stopped at the end; yields its host:port."""
        self.start_gateway(label, free_port(), flags)
        try:
            yield self.address_of(label)
        finally:
            self.processes.pop(label).stop()

    @property
    def openai(self) -> openai.OpenAI:
        return openai_at(self.address_of("gateway"))

    def post(self, path: str, body: object, **headers: str) -> Answer:
        return post(self.address_of("gateway"), path, body, **headers)

    def get(self, path: str, **headers: str) -> Answer:
        return request(self.address_of("gateway"), "GET", path, None, headers)


@dataclass(frozen=True)
class Answer:
    """What came back whole."""

    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def events(self) -> list[Any]:
        """Those of a stream that are JSON."""
        return [json.loads(line[6:]) for line in self.content.splitlines() if line.startswith(b"data: {")]

    @property
    def error(self) -> dict[str, Any]:
        """The error, in OpenAI's shape and no other."""
        (name,) = self.json
        error: dict[str, Any] = self.json[name]
        assert (name, set(error)) == ("error", {"message", "type", "param", "code"})
        assert error["message"]
        return error


def answer_of(response: http.client.HTTPResponse) -> Answer:
    return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())


def openai_at(address: str, api_key: str = "any") -> openai.OpenAI:
    # Nobody closes it: the collector would close what it kept, and its warning fail another's test.
    alone = {"Connection": "close"}
    url = f"http://{address}/v1"
    return openai.OpenAI(base_url=url, api_key=api_key, max_retries=0, timeout=WAIT_S, default_headers=alone)


def endless_text(address: str, **fields: Any) -> Iterator[Any]:
    """The chunks of a completion that no end token ends, as the official client reads them."""
    asked: dict[str, Any] = {"model": "", "prompt": "a", "seed": 1, "max_tokens": LONG, "stream": True} | fields
    return iter(openai_at(address).completions.create(**asked, extra_body={"ignore_eos": True}))


def post(address: str, path: str, body: object, **headers: str) -> Answer:
    """`body`: bytes as they are, or what JSON is made of."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return request(address, "POST", path, content, {"Content-Type": "application/json"} | headers)


def request(address: str, method: str, path: str, content: bytes | None, headers: dict[str, str]) -> Answer:
    connection = http.client.HTTPConnection(address, timeout=WAIT_S)
    try:
        connection.request(method, path, content, {name.replace("_", "-"): value for name, value in headers.items()})
        return answer_of(connection.getresponse())
    finally:
        connection.close()


def post_bytes(address: str, path: str, body: object) -> bytes:
    """A request as it is sent."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


@contextmanager
def streaming(address: str, path: str, body: dict[str, Any], receive_buffer: int = 0) -> Iterator[socket.socket]:
    """A socket whose streamed response has begun; leaving the block closes it, read or not."""
    host, port = address.rsplit(":", 1)
    with socket.socket() as stream:
        if receive_buffer:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        stream.settimeout(WAIT_S)
        stream.connect((host, int(port)))
        stream.sendall(post_bytes(address, path, body | {"stream": True}))
        assert stream.recv(12) == b"HTTP/1.1 200"
        yield stream
