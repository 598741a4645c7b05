"""Bodies of every endpoint of the gateway that reads one: right ones, and mutations of their JSON and their bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.fuzz.byte_mutations import mutated_bytes
from tests.fuzz.odd_values import deep_json, deep_somewhere, mutated_json

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
