"""A running gateway over HTTP: mutated bodies to every endpoint that reads one."""

from __future__ import annotations

import asyncio
import http.client
import json
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fuzz.cases import ACCEPTED, FuzzCase, Untyped
from tests.fuzz.http_bodies import HttpCase, mutated_body
from tests.fuzz.running_services import WatchedServices
from tests.gateway.gateways import GatewayCluster

MODEL = "table:vocab=300,seed=1,max_length=192"
"""Short texts, so that no request is long."""
ANSWER_S = 20.0
IDLE_S = 2.0
"""Connections that are idle for longer are not used again: uvicorn closes them after 5 s."""
PROBE = HttpCase(
    "/v1/completions",
    b'{"prompt": "abc", "max_tokens": 6, "seed": 3, "return_token_ids": true}',
    {"Content-Type": "application/json"},
)
_OPENAI = {"message", "type", "param", "code"}


@dataclass
class GatewayTarget:
    watched: WatchedServices
    connection: http.client.HTTPConnection
    expected: Any = None
    asked: float = 0.0

    async def run(self, case: FuzzCase) -> str:
        kind = await asyncio.to_thread(self._answered, mutated_body(case.rng, MODEL))
        self.watched.check()
        return kind

    async def probe(self) -> None:
        status, content = await asyncio.to_thread(self._sent, PROBE)
        assert status == 200, content
        ids = json.loads(content)["choices"][0]["token_ids"]
        self.expected = self.expected or ids
        assert ids == self.expected, "the same text as before all cases"
        await self.watched.check_held()

    def facts(self) -> dict[str, str]:
        return self.watched.facts()

    def _answered(self, case: HttpCase) -> str:
        status, content = self._sent(case)
        if status == 200:
            return _stream_kind(case, content)
        if not 400 <= status < 500:
            raise Untyped(f"{case.path}: {status} {content[:200]!r}")
        return f"{status} {_code_of(case, content)}"

    def _sent(self, case: HttpCase) -> tuple[int, bytes]:
        if time.monotonic() - self.asked > IDLE_S:
            self.connection.close()  # the server may close it at any moment
        try:
            self.connection.request("POST", case.path, case.body, dict(case.headers))
            response = self.connection.getresponse()
            return response.status, response.read()
        except (http.client.HTTPException, OSError) as error:
            self.connection.close()
            raise Untyped(f"{case.path}: no answer: {error!r}") from error
        finally:
            self.asked = time.monotonic()


def _code_of(case: HttpCase, content: bytes) -> str:
    """The code of an error in the endpoint's own shape."""
    try:
        body = json.loads(content)
        if case.path.startswith("/v1/messages"):
            assert body["type"] == "error", body
            return str(body["error"]["type"])
        assert set(body["error"]) == _OPENAI, body
        assert body["error"]["message"], "it says what is wrong"
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise Untyped(f"{case.path}: an error of another shape: {content[:200]!r}") from error
    return str(body["error"]["code"])


def _stream_kind(case: HttpCase, content: bytes) -> str:
    """What an answer is; one that is streamed may end with an error."""
    for line in content.split(b"\n"):
        if line.startswith(b"data: {") and b'"error"' in line[:200]:
            said = json.loads(line[6:])
            error = said.get("error") or said.get("response", {}).get("error")
            if error is None:
                continue
            kind = str(error.get("type") or error.get("code"))
            if kind in ("server_error", "api_error", "internal_error"):
                raise Untyped(f"{case.path}: in its stream {line[:300]!r}")
            return f"200, then {kind}"
    return ACCEPTED


@asynccontextmanager
async def open_http(seed: int) -> AsyncIterator[GatewayTarget]:
    with (
        tempfile.TemporaryDirectory() as folder,
        GatewayCluster(Path(folder), target_model=MODEL) as cluster,
        closing(http.client.HTTPConnection(cluster.address_of("gateway"), timeout=ANSWER_S)) as connection,
    ):
        yield GatewayTarget(WatchedServices(cluster), connection)
