"""Answers that are sent whole: bounded by bytes, refused before where that can be known, and written in pieces."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest
from pydantic_core import to_json

from paceline.protocol.generation import GenerateRequest
from paceline.protocol.sampling import SamplingParams
from paceline.runtime.gateway_config import GatewayConfig
from paceline_gateway.http.answers import LongLists, answer_json
from paceline_gateway.http.errors import HttpError
from paceline_gateway.openai.chunks import LOGPROB_BYTES, check_answer
from paceline_gateway.openai.folding import FoldedChat, FoldedCompletion, fold
from paceline_gateway.openai.types import CompletionRequest
from tests.gateway.gateways import GatewayCluster

MOST_PROBABLE = [{"token": "c", "logprob": -math.inf}]
ENTRY = {"token": 'a"b', "logprob": -1.5, "bytes": [97, 34, 98], "top_logprobs": MOST_PROBABLE}


def test_lists_in_pieces_are_the_same_json() -> None:
    lists = LongLists()
    for entries in ([], [ENTRY], [], [ENTRY, ENTRY]):
        lists.extend({"content": entries, "refusal": None})
    empty = LongLists()
    empty.extend({"tokens": [], "text_offset": []})
    text = f'"{LongLists().marker}" and {lists.marker[:20]}'
    answer = {"choices": [{"logprobs": lists, "text": text}, {"logprobs": empty}, {"logprobs": None}], "n": math.nan}
    logprobs = [{"content": [ENTRY] * 3, "refusal": None}, {"tokens": [], "text_offset": []}, None]
    first, *others = ({"logprobs": each} for each in logprobs)
    expected = {"choices": [first | {"text": text}, *others], "n": None}
    assert json.loads(answer_json(answer)) == json.loads(to_json(expected, inf_nan_mode="null"))
    assert lists.size == len(to_json([ENTRY] * 3, inf_nan_mode="null")) - 1
    assert answer_json({"text": text}) == to_json({"text": text})


CHAT = {"delta": {"content": "abcd", "reasoning_content": "ef", "tool_calls": []}}
CALL = {"delta": {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "x" * 5}}]}}
COMPLETION = {"text": "abcdef", "logprobs": None}
SCORED = {"text": "", "logprobs": {"tokens": ["abc"]}}
NUMBERED = {"text": "", "token_ids": [1]}


@pytest.mark.parametrize(
    ("kind", "part", "size"),
    [(FoldedChat, CHAT, 6), (FoldedChat, CALL, 6), (FoldedCompletion, COMPLETION, 6), (FoldedCompletion, SCORED, 6),
     (FoldedCompletion, NUMBERED, 40)],
)  # fmt: skip
async def test_an_answer_that_grows_too_long_ends(kind: Any, part: dict[str, Any], size: int) -> None:
    """Whatever it grows by."""
    made = 0

    async def chunks() -> AsyncGenerator[Any, None]:
        nonlocal made
        for number in range(100):
            made += 1
            yield {"id": "x", "choices": [{"index": number % 2} | part]}

    most = 20 * size
    with pytest.raises(HttpError, match=f"max_answer_bytes = {most}") as caught:
        await fold(chunks(), kind, "kind", most)
    assert made == 21
    assert (caught.value.status, caught.value.code) == (400, "answer_too_large")


@pytest.mark.parametrize(
    ("fields", "asked", "entries"),
    [
        ({"n": 4}, {"max_new_tokens": 10, "sampling": SamplingParams(logprobs=20)}, 4 * 10 * 21),
        ({}, {"max_new_tokens": 100, "sampling": SamplingParams(logprobs=0)}, 100),
        ({}, {"max_new_tokens": 1, "prompt_logprobs": 20}, 3 * 21),
        ({"n": 4}, {"max_new_tokens": 1, "prompt_logprobs": 2}, 4 * 3 * 3),
        ({}, {"max_new_tokens": 10_000}, 0),
        ({}, {"max_new_tokens": None, "sampling": SamplingParams(logprobs=20)}, 0),
    ],
)
def test_log_probabilities_are_counted_before_they_are_made(
    fields: dict[str, Any], asked: dict[str, Any], entries: int
) -> None:
    """Those of two prompts of three tokens."""
    requests = [replace(GenerateRequest(token_ids=(1, 2, 3)), **asked)] * 2
    body = CompletionRequest(prompt="a", **fields)
    size = 2 * entries * LOGPROB_BYTES
    check_answer(GatewayConfig(max_answer_bytes=max(1024, size)), body, requests)
    if entries:
        least = GatewayConfig(max_answer_bytes=size - 1)
        with pytest.raises(HttpError, match="answer is too large"):
            check_answer(least, body, requests)
        check_answer(least, body.model_copy(update={"stream": True}), requests)


def test_an_answer_that_would_be_too_large_is_refused_and_the_next_is_right(gateway: GatewayCluster) -> None:
    large = {"prompt": "a", "n": 128, "max_tokens": 500, "logprobs": 20, "seed": 1}
    refused = gateway.post("/v1/completions", large)
    assert (refused.status, refused.error["param"], refused.error["code"]) == (400, "logprobs", "answer_too_large")
    message: Any = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20}
    assert gateway.post("/v1/chat/completions", message | {"n": 128, "max_tokens": 500}).status == 400
    echoed = {"prompt": ["a" * 10_000] * 8, "max_tokens": 0, "echo": True, "logprobs": 20}
    assert gateway.post("/v1/completions", echoed).error["code"] == "answer_too_large"
    assert len(gateway.post("/v1/completions", large | {"n": 2, "max_tokens": 3}).json["choices"]) == 2
