"""Fields as long as a body may be: refused by their names, at once, while everybody else is served."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import pytest

from paceline_gateway.http.shapes import MAX_PARTS
from tests.gateway.canned import JSON, serving
from tests.gateway.templates import HERMES


def called(arguments: str) -> dict[str, Any]:
    """A turn that has called a function."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


ASKED: dict[str, Any] = {"prompt": "a", "max_tokens": 2}
CHATS = "/v1/chat/completions"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "q"}]}
ELSEWHERE = ["tools", "biases", "a schema", "bad words", "choices", "parts", "turns", "functions", "a model", "items"]
"""In `make test-full`: another field of these is refused by the same rule."""
NOTICED_S = 1.5
"""What the loop may stand on a busy machine: once it was 38 s. All of these take 0.2 s at most on an idle one."""
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"enum": [[]] * 1_000_000}}}
LARGE: dict[str, tuple[dict[str, Any], str | None]] = {
    "one bad word": ({"bad_words": ["ab " * 1_300_000]}, "bad_words"),
    "bad words": ({"bad_words": ["ab " * 170_000] * 8}, "bad_words"),
    "many bad words": ({"bad_words": ["ab"] * 600_000}, "bad_words"),
    "stop strings": ({"stop": ["ab"] * 600_000}, "stop"),
    "stop ids": ({"stop_token_ids": [1] * 1_300_000}, "stop_token_ids"),
    "lists": ({"prompt": [[1]] * 900_000}, None),
    "tools": ({"tools": [{}] * 900_000}, None),
    "biases": ({"logit_bias": {str(number): 1 for number in range(200_000)}}, None),
    "a grammar": ({"structured_outputs": {"regex": "a" * 3_900_000}}, "structured_outputs.regex"),
    "choices": ({"structured_outputs": {"choice": ["ab"] * 600_000}}, "structured_outputs.choice"),
    "a schema": ({"response_format": SCHEMA}, None),
    "labels": ({"metadata": {str(number): "" for number in range(200_000)}}, None),
    "a prompt": ({"prompt": "ab " * 1_300_000}, "prompt"),
}
"""Fields of 4 MB, one in each request, and the one that an error names: none where the body has too many parts."""
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "parts": (CHATS, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 90_000}]}),
    "turns": (CHATS, {"messages": [{"role": "user", "content": ""}] * 100_000}),
    "functions": (CHATS, CHAT | {"tools": [{}] * 900_000}),
    "a model": (CHATS, CHAT | {"model": "a" * 4_000_000}),
    "arguments": (CHATS, {"messages": [called('{"a": [' + "[]," * 1_200_000 + "[]]}")]}),
    "many calls": (CHATS, {"messages": [called('{"a": [' + "[]," * 20_000 + "[]]}")] * 60}),
    "items": ("/v1/responses", {"input": [{"role": "user", "content": "a"}] * 90_000}),
    "a name": ("/v1/messages", CHAT | {"model": "a" * 4_000_000, "max_tokens": 2}),
    "ends": ("/v1/messages", CHAT | {"model": "m", "max_tokens": 2, "stop_sequences": ["ab"] * 600_000}),
    "tokens": ("/detokenize", {"tokens": [1] * 1_900_000}),
    "a text": ("/tokenize", {"prompt": "ab " * 1_300_000}),
}  # fmt: skip
"""Of other routes."""


async def answered(http: Any, path: str, body: dict[str, Any]) -> tuple[Any, float]:
    """The answer, and how long the loop stood at most meanwhile."""
    content = json.dumps(body, separators=(",", ":")).encode()
    loop, longest = asyncio.get_running_loop(), 0.0
    asking = asyncio.create_task(http.post(path, content=content, headers=JSON))
    while not asking.done():
        began = loop.time()
        await asyncio.wait((asking,), timeout=0.002)
        longest = max(longest, loop.time() - began)
    return asking.result(), longest


def some_and_others(fields: Iterable[str]) -> pytest.MarkDecorator:
    """Those of `make test`, and those that are left to `make test-full`."""
    others = [name for name in fields if name in ELSEWHERE]
    some = [name for name in fields if name not in ELSEWHERE]
    return pytest.mark.parametrize(
        "names", [some, pytest.param(others, marks=pytest.mark.full)], ids=["some", "others"]
    )


@some_and_others(LARGE)
async def test_large_fields_are_refused_by_their_names(names: list[str]) -> None:
    async with serving(HERMES, "Yes.") as served:
        for name in names:
            field, param = LARGE[name]
            answer, stood_s = await answered(served.http, "/v1/completions", ASKED | field)
            assert answer.status_code == 400, (name, answer.content[:200])
            error = answer.json()["error"]
            assert error["param"] in (param, f"{param}.0"), (name, error)
            assert param is not None or str(MAX_PARTS) in error["message"]
            assert len(answer.content) < 1000
            assert stood_s < NOTICED_S, name
        assert not served.canned.asked
        after, _ = await answered(served.http, "/v1/completions", ASKED)
        assert after.json()["choices"][0]["text"] == "Yes."


@some_and_others(OTHERS)
async def test_large_fields_of_other_routes_are_refused(names: list[str]) -> None:
    async with serving(HERMES, "Yes.") as served:
        for name in names:
            answer, stood_s = await answered(served.http, *OTHERS[name])
            assert answer.status_code == 400, (name, answer.content[:200])
            assert stood_s < NOTICED_S, name
        assert not served.canned.asked


@pytest.mark.parametrize(
    "text",
    ['{[:"' * 30_000, "\\\\" * 50_000 + '"' + "[" * 200_000, '\\"' * 70_000],
    ids=["marks", "escapes", "quotes"],
)
async def test_what_stands_in_strings_is_no_part(text: str) -> None:
    async with serving(HERMES, "Yes.") as served:
        answer, _ = await answered(served.http, "/v1/completions", ASKED | {"prompt": text})
        assert answer.status_code == 200 or answer.json()["error"]["param"] == "prompt", "longer than the context"
