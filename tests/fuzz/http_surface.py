"""A running gateway over HTTP: mutated bodies to every endpoint that reads one."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fuzz.cases import ACCEPTED, FuzzCase, Untyped
from tests.fuzz.odd_values import deep_json, deep_somewhere, mutated_bytes, mutated_json
from tests.fuzz.running_services import WatchedServices
from tests.gateway.gateways import GatewayCluster

_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "d",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
_CALL = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"place": "a"}'}}
_USER = {"role": "user", "content": "a"}
_CHOICE = {"properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
_SCHEMA = {"type": "object", **_CHOICE}
_NAMED = {"name": "n", "schema": _SCHEMA}
_FORMAT = {"type": "json_schema", "schema": _SCHEMA}
_PART = {"type": "text", "text": "s"}
_ANSWER = {"role": "assistant", "content": None, "tool_calls": [_CALL]}
_RESULT = {"role": "tool", "content": "r", "tool_call_id": "c1"}
_USE = {"type": "tool_use", "id": "c1", "name": "look_up", "input": {"place": "a"}}
_USED = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "r"}]}
_ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "function_call", "call_id": "c1", "name": "look_up", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "r"},
]
_PACELINE = {"drafter": "ngram", "num_draft_tokens": 2, "acceptance": "coupled", "explain": True, "rounds": True}
BODIES: Mapping[str, Sequence[dict[str, Any]]] = {
    "/v1/completions": (
        {"prompt": "abc", "max_tokens": 4, "seed": 1, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.01},
        {"prompt": [97, 98], "max_tokens": 4, "n": 2, "logprobs": 2, "echo": True, "stop": ["x"], "stream": True},
        {"prompt": ["a", "b"], "max_tokens": 3, "logit_bias": {"5": 2.0}, "bad_words": ["z"], "min_tokens": 1},
        {"prompt": "a", "max_tokens": 6, "structured_outputs": {"regex": "[a-c]{2}"}, "paceline": _PACELINE},
        {"prompt": "a", "max_tokens": 6, "structured_outputs": {"choice": ["yes", "no"]}, "metadata": {"a": "b"}},
        {"prompt": "a", "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}},
    ),
    "/v1/chat/completions": (
        {"messages": [_USER], "max_tokens": 4, "logprobs": True, "top_logprobs": 1, "seed": 5},
        {"messages": [{"role": "system", "content": [_PART]}, _USER], "max_tokens": 3, "n": 2},
        {"messages": [_USER], "max_tokens": 8, "tools": [_TOOL], "tool_choice": "auto", "parallel_tool_calls": True},
        {"messages": [_USER, _ANSWER, _RESULT], "max_tokens": 4, "stream": True},
        {"messages": [_USER], "max_tokens": 8, "response_format": {"type": "json_schema", "json_schema": _NAMED}},
        {"messages": [_USER], "max_tokens": 4, "prediction": {"type": "content", "content": "abcd"}, "stop": "q"},
    ),
    "/v1/responses": (
        {"input": "a", "max_output_tokens": 4, "instructions": "i", "temperature": 0.5},
        {"input": _ITEMS, "max_output_tokens": 4, "stream": True},
        {
            "input": "a",
            "max_output_tokens": 6,
            "tools": [{"type": "function", "name": "look_up", "parameters": _SCHEMA}],
            "tool_choice": "auto",
            "text": {"format": {"type": "json_schema", **_NAMED}},
        },
    ),
    "/v1/messages": (
        {"model": "m", "messages": [_USER], "max_tokens": 4, "system": "s", "stop_sequences": ["x"]},
        {
            "model": "m",
            "messages": [_USER, {"role": "assistant", "content": [_PART, _USE]}, _USED],
            "max_tokens": 4,
            "tools": [{"name": "look_up", "description": "d", "input_schema": _SCHEMA}],
            "tool_choice": {"type": "auto"},
            "stream": True,
        },
        {"model": "m", "messages": [_USER], "max_tokens": 6, "output_config": {"format": _FORMAT}},
    ),
    "/v1/messages/count_tokens": ({"model": "m", "messages": [_USER], "system": [_PART]},),
    "/tokenize": (
        {"prompt": "abc", "add_special_tokens": True, "return_token_strs": True},
        {"messages": [_USER], "add_generation_prompt": True, "chat_template_kwargs": {"a": 1}},
    ),
    "/detokenize": ({"tokens": [97, 98, 300]}, {"tokens": [97, 98]}),
}  # fmt: skip
_MODEL = "m"


@dataclass(frozen=True)
class HttpCase:
    path: str
    body: bytes
    headers: Mapping[str, str]


def mutated_body(rng: random.Random, model: str) -> HttpCase:
    """A request to any endpoint; `model` is the one that is served."""
    path = rng.choice(tuple(BODIES))
    others = [body for each in BODIES.values() for body in each]
    value = mutated_json(rng, rng.choice(BODIES[path]), others, most=2)
    text = json.dumps(value)
    if rng.random() < 0.08:
        text = deep_somewhere(rng, value)
    body = text.replace(f'"model": "{_MODEL}"', f'"model": "{model}"').encode()
    if rng.random() < 0.15:
        body = mutated_bytes(rng, body, json.dumps(rng.choice(others)).encode())
    elif rng.random() < 0.02:
        body = deep_json(rng)
    return HttpCase(path, body, _headers(rng))


def _headers(rng: random.Random) -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    if rng.random() < 0.1:
        odd = ("", "text/plain", "application/json; charset=utf-16", "multipart/form-data", "x" * 300)
        name = rng.choice(("Content-Type", "Authorization", "traceparent", "X-Request-Id", "Accept", "x-api-key"))
        headers[name] = rng.choice(odd)
    return headers


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
