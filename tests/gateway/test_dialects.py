"""Tools and the further dialects through a whole gateway, with the official clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

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


@pytest.fixture(scope="module")
def claude(gateway: GatewayCluster) -> Iterator[Any]:
    from anthropic import Anthropic  # 3,000 modules: no worker reads them to collect tests

    address = f"http://{gateway.address_of('gateway')}"
    with Anthropic(api_key="any", base_url=address, max_retries=0, timeout=20) as client:
        yield client


def chat(gateway: GatewayCluster, **fields: Any) -> Any:
    base = {"model": MODEL, "messages": ASKED, "seed": SEED, "max_completion_tokens": 200, "tools": [TOOL]}
    return gateway.openai.chat.completions.create(**(base | fields))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_that_must_come_fits_its_schema(gateway: GatewayCluster, choice: Any) -> None:
    alone = {"tool_choice": choice, "parallel_tool_calls": False}
    whole = chat(gateway, **alone)
    (call,) = whole.choices[0].message.tool_calls
    assert (whole.choices[0].finish_reason, whole.choices[0].message.content) == ("tool_calls", None)
    assert call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    pieces = [
        piece for chunk in chat(gateway, stream=True, **alone) for piece in chunk.choices[0].delta.tool_calls or ()
    ]
    assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments
    assert [bool(piece.id) for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert len(pieces) > 2


WET = {"properties": {"wet": {"type": "boolean"}}, "required": ["wet"], "additionalProperties": False}
ANSWER: dict[str, Any] = {"type": "object", **WET}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}


MISSED: dict[str, Any] = {"type": "object", "minProperties": 3}
BY_A_FUNCTION = {"tools": [{"type": "function", "function": {"name": "f", "parameters": MISSED}}]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": FORMAT | {"json_schema": {"name": "a", "schema": MISSED}}}, "response_format"),
        ({"response_format": FORMAT, **BY_A_FUNCTION}, "tools"),
        ({"tool_choice": "required", **BY_A_FUNCTION}, "tools"),
        ({"tools": None, "structured_outputs": {"json": MISSED}}, "structured_outputs.json"),
    ],
)
def test_a_schema_that_can_t_be_kept_is_refused_by_the_request_s_field(
    gateway: GatewayCluster, fields: dict[str, Any], param: str, stream: bool
) -> None:
    base = {"messages": ASKED, "max_tokens": 50, "tools": [TOOL], "stream": stream}
    answer = gateway.post("/v1/chat/completions", base | fields)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert "#/minProperties: must be at most 1" in answer.error["message"]
    assert chat(gateway, response_format=FORMAT).choices[0].finish_reason in ENDS, "the next one is served"


ENDS = {"length": ("max_tokens", "incomplete"), "stop": ("end_turn", "completed")}


@pytest.mark.parametrize("seed", [SEED, 11])
def test_messages_and_responses_are_the_chat_s_text(gateway: GatewayCluster, claude: Any, seed: int) -> None:
    asked = chat(gateway, tools=[], seed=seed, max_completion_tokens=40)
    text, tokens = asked.choices[0].message.content, asked.usage.completion_tokens
    stop_reason, status = ENDS[asked.choices[0].finish_reason]
    fields: Any = {"model": MODEL, "max_tokens": 40, "messages": ASKED, "extra_body": {"seed": seed}}
    whole = claude.messages.create(**fields)
    with claude.messages.stream(**fields) as stream:
        assert "".join(stream.text_stream) == text == whole.content[0].text
        final = stream.get_final_message()
    counted = claude.messages.count_tokens(model=MODEL, messages=ASKED).input_tokens
    for message in (whole, final):
        assert (message.stop_reason, message.usage.output_tokens) == (stop_reason, tokens)
        assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == counted
    fields = {"model": MODEL, "input": ASKED, "max_output_tokens": 40, "extra_body": {"seed": seed}}
    response = gateway.openai.responses.create(**fields)
    with gateway.openai.responses.stream(**fields) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert response.output_text == "".join(deltas) == text
    assert (response.status, response.usage.output_tokens) == (status, tokens)
