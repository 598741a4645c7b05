"""Tools and the further dialects through a whole gateway."""

from __future__ import annotations

import json
from typing import Any

import jsonschema

from tests.gateway.gateways import MODEL, GatewayCluster

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Bonn", "Kiel"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "Tells the weather.", "parameters": SCHEMA}
TOOL: Any = {"type": "function", "function": FUNCTION}
ASKED: Any = [{"role": "user", "content": "How is it in Kiel?"}]
SEED = 7


def chat(gateway: GatewayCluster, **fields: Any) -> Any:
    base = {"model": MODEL, "messages": ASKED, "seed": SEED, "max_completion_tokens": 200, "tools": [TOOL]}
    return gateway.openai.chat.completions.create(**(base | fields))


def test_a_call_that_must_come_fits_its_schema(gateway: GatewayCluster) -> None:
    alone = {"tool_choice": "required", "parallel_tool_calls": False}
    whole = chat(gateway, **alone)
    (call,) = whole.choices[0].message.tool_calls
    assert (whole.choices[0].finish_reason, whole.choices[0].message.content) == ("tool_calls", None)
    assert call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    chunks = chat(gateway, stream=True, **alone)
    pieces = [piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments
    assert [bool(piece.id) for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert len(pieces) > 2


WET = {"properties": {"wet": {"type": "boolean"}}, "required": ["wet"], "additionalProperties": False}
ANSWER: dict[str, Any] = {"type": "object", **WET}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}
MISSED: dict[str, Any] = {"type": "object", "minProperties": 3}
BY_A_FUNCTION = {"tools": [{"type": "function", "function": {"name": "f", "parameters": MISSED}}]}


def test_a_schema_that_can_t_be_kept_is_refused_by_the_request_s_field(gateway: GatewayCluster) -> None:
    base = {"messages": ASKED, "max_tokens": 50, "tools": [TOOL]}
    refused: list[tuple[str, dict[str, Any]]] = [
        ("response_format", {"response_format": FORMAT | {"json_schema": {"name": "a", "schema": MISSED}}}),
        ("tools", {"response_format": FORMAT, "stream": True, **BY_A_FUNCTION}),
        ("tools", {"tool_choice": "required", **BY_A_FUNCTION}),
        ("structured_outputs.json", {"tools": None, "stream": True, "structured_outputs": {"json": MISSED}}),
    ]
    for param, fields in refused:
        answer = gateway.post("/v1/chat/completions", base | fields)
        assert (answer.status, answer.error["param"]) == (400, param)
        assert "#/minProperties: must be at most 1" in answer.error["message"]
    assert chat(gateway, response_format=FORMAT).choices[0].finish_reason in ENDS, "the next one is served"


ENDS = {"length": ("max_tokens", "incomplete"), "stop": ("end_turn", "completed")}


def test_messages_and_responses_are_the_chat_s_text(gateway: GatewayCluster) -> None:
    """`test_canned` has them as the official clients read them."""
    asked = chat(gateway, tools=[], max_completion_tokens=40)
    text, tokens = asked.choices[0].message.content, asked.usage.completion_tokens
    stop_reason, status = ENDS[asked.choices[0].finish_reason]
    fields: Any = {"model": MODEL, "messages": ASKED}
    counted = gateway.post("/v1/messages/count_tokens", fields).json["input_tokens"]
    fields |= {"max_tokens": 40, "seed": SEED}
    message = gateway.post("/v1/messages", fields).json
    events = gateway.post("/v1/messages", fields | {"stream": True}).events
    deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(deltas) == text == message["content"][0]["text"]
    last = next(event for event in events if event["type"] == "message_delta")
    for ended, usage in ((message, message["usage"]), (last["delta"], last["usage"])):
        assert (ended["stop_reason"], usage["output_tokens"]) == (stop_reason, tokens)
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted
    fields = {"model": MODEL, "input": ASKED, "max_output_tokens": 40, "extra_body": {"seed": SEED}}
    response = gateway.openai.responses.create(**fields)
    with gateway.openai.responses.stream(**fields) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert response.output_text == "".join(deltas) == text
    assert (response.status, response.usage.output_tokens) == (status, tokens)
