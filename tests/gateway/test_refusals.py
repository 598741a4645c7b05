"""Bad input: an error of OpenAI's shape that names the parameter, never a 5xx, and nothing is held after it."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest

from tests.gateway.gateways import MODEL, GatewayCluster

COMPLETION: dict[str, Any] = {"prompt": "a", "max_tokens": 2}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
DEEP = b"[" * 100_000
FUNCTION = {"type": "function", "function": {"name": "f"}}
PACELINE = {"drafter": "nobody", "num_draft_tokens": 65, "acceptance": "typical", "colour": 1}

VALUES: dict[str, list[Any]] = {
    "prompt": [None, [300], ["a", 1], "\ud800", "a" * 40_000],
    "max_tokens": [40_000, 1 << 70], "min_tokens": [3], "n": [129], "best_of": [2], "suffix": ["x"],
    "temperature": [float("nan")], "top_p": [0], "top_k": [-2], "min_p": [2], "seed": [1 << 64], "logprobs": [21],
    "presence_penalty": [3], "repetition_penalty": [0], "logit_bias": [{"300": 1}], "bad_words": [[" "]],
    "stop": [["a"] * 17], "stop_token_ids": [[300]], "structured_outputs": [{"regex": "a", "choice": ["b"]}],
}  # fmt: skip
"""By the one field that is wrong."""
COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    *(({name: value}, name) for name, values in VALUES.items() for value in values),
    *(({"paceline": {name: value}}, f"paceline.{name}") for name, value in PACELINE.items()),
    ({"prompt": [-1], "echo": True}, "prompt"),
    ({"prompt": [[1], [300]], "echo": True, "logprobs": 1}, "prompt"),
    ({"prompt": ["a"] * 129}, "n"),
    ({"echo": True, "logprobs": 21}, "logprobs"),
    ({"echo": True, "max_tokens": 0, "min_tokens": 1}, "min_tokens"),
    ({"logprobs": 1, "max_tokens": 0}, "max_tokens"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"other": True}}, "stream_options.other"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    ({"structured_outputs": {"regex": "a"}, "stop_token_ids": [1]}, "stop_token_ids"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"\ud800": 1}, "?"),
]
CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": "\udfff"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "a" * 40_000}]}, "messages"),
    ({"messages": [{"role": "tool", "content": "a", "tool_call_id": "1"}]}, "messages.0.tool_call_id"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_completion_tokens": 3}, "max_tokens"),
    ({"modalities": ["audio"]}, "modalities.0"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools.0.function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "description": "\udfff"}}]}, "tools"),
    ({"tools": [FUNCTION], "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"prediction": {"type": "guess", "content": "a"}}, "prediction.type"),
    ({"reasoning_effort": "much"}, "reasoning_effort"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
]


@pytest.mark.parametrize(("fields", "param"), COMPLETIONS, ids=[f"{i}-{p}" for i, (_, p) in enumerate(COMPLETIONS)])
def test_a_completion_is_refused_by_name(gateway: GatewayCluster, fields: dict[str, Any], param: str) -> None:
    for body in (COMPLETION | fields, COMPLETION | fields | {"stream": True}):
        if "stream_options" in fields and not fields.get("stream") and body.get("stream"):
            continue
        answer = gateway.post("/v1/completions", body)
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error"), answer.content
        assert answer.error["param"] == (answer.error["param"] if param == "?" else param)


@pytest.mark.parametrize(("fields", "param"), CHATS, ids=[f"{i}-{p}" for i, (_, p) in enumerate(CHATS)])
def test_a_chat_is_refused_by_name(gateway: GatewayCluster, fields: dict[str, Any], param: str) -> None:
    answer = gateway.post("/v1/chat/completions", CHAT | fields)
    assert (answer.status, answer.error["param"]) == (400, param), answer.content


NO_BODIES: dict[str, tuple[bytes, int]] = {
    "bytes": (b"\xff\xfe{}", 400),
    "lone surrogate": (
        b'{"input": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}], "max_tokens": 1}', 400
    ),
    "deep": (DEEP, 400),
    "empty": (b"", 400),
    "cut": (b"{", 400),
    "no UTF-8": (b'{"prompt": "\xff"}', 400),
    "long number": (b'{"prompt": "a", "n": ' + b"1" * 5000 + b"}", 400),
    "list": (b"[]", 400),
    "deep object": (b'{"a":' * 100_000, 400),
    "huge": (b'{"prompt": "' + b"a" * (4 << 20) + b'"}', 413),
}  # fmt: skip
OF_EACH_ROUTE = ("bytes", "lone surrogate", "deep")
ROUTES = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
)


def test_a_body_that_is_none_is_refused(gateway: GatewayCluster) -> None:
    for path, name in (*product(["/v1/completions"], NO_BODIES), *product(ROUTES, OF_EACH_ROUTE)):
        content, status = NO_BODIES[name]
        answer = gateway.post(path, content)
        assert answer.status == status, (path, name, answer.content)
        if path.startswith("/v1/messages"):
            assert set(answer.json["error"]) == {"type", "message"}
        else:
            assert answer.error["type"] == "invalid_request_error"


def test_a_body_is_json_by_its_content_type_too(gateway: GatewayCluster) -> None:
    answer = gateway.post("/v1/completions", COMPLETION, Content_Type="text/plain")
    assert (answer.status, "application/json" in answer.error["message"]) == (400, True)


def test_a_body_without_a_length_is_bounded_too(gateway: GatewayCluster) -> None:
    chunk = b"a" * (1 << 20)
    framed = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for _ in range(5)) + b"0\r\n\r\n"
    answer = gateway.post("/v1/completions", framed, Transfer_Encoding="chunked")
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")


@pytest.mark.parametrize(("path", "status"), [("/v1/nothing", 404), ("/v1/completions", 405)])
def test_what_is_not_there_is_told_in_the_same_shape(gateway: GatewayCluster, path: str, status: int) -> None:
    answer = gateway.get(path)
    assert (answer.status, bool(answer.error)) == (status, True)


def test_another_model_is_not_found(gateway: GatewayCluster) -> None:
    for answer in (
        gateway.post("/v1/completions", COMPLETION | {"model": "gpt-4o"}),
        gateway.post("/v1/chat/completions", CHAT | {"model": "gpt-4o"}),
        gateway.post("/tokenize", {"prompt": "a", "model": "gpt-4o"}),
        gateway.get("/v1/models/gpt-4o"),
    ):
        assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")
        assert MODEL in answer.error["message"]


def test_a_key_that_none_can_be_is_refused_in_each_shape(gateway: GatewayCluster) -> None:
    answer = gateway.post("/v1/completions", COMPLETION, Authorization="Bearer \xe9")
    assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
    for path, shape in (("/v1/messages", "type"), ("/v1/responses", "error")):
        answer = gateway.post(path, {}, x_api_key="a b")
        assert (answer.status, next(iter(answer.json))) == (401, shape)


def test_nothing_is_held_after_all_that(gateway: GatewayCluster) -> None:
    assert gateway.post("/v1/completions", COMPLETION).status == 200
    gateway.wait_idle()
    assert json.loads(gateway.get("/load").content) == {"server_load": 0}
