"""Tools and the further dialects through a whole gateway, with the official clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from anthropic import Anthropic

from tests.gateway.gateways import MODEL, GatewayCluster

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Bonn", "Kiel"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "Tells the weather.", "parameters": SCHEMA}
TOOL: Any = {"type": "function", "function": FUNCTION}
CLAUDE_TOOL: Any = {"name": "get_weather", "input_schema": SCHEMA}
ASKED: Any = [{"role": "user", "content": "How is it in Kiel?"}]
CALLED = {"name": "get_weather", "arguments": '{"city": "Kiel", "days": 2}'}
CALL: Any = {"id": "c1", "type": "function", "function": CALLED}
SEED = 7


@pytest.fixture(scope="module")
def claude(gateway: GatewayCluster) -> Iterator[Anthropic]:
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


def test_a_reply_is_an_answer_in_the_format_or_calls_streamed_as_whole(gateway: GatewayCluster) -> None:
    for first, reason in (("{", "stop"), ("<", "tool_calls")):
        bias = {str(ord(first)): 100}
        fields = {"response_format": FORMAT, "parallel_tool_calls": False, "logit_bias": bias}
        choice = chat(gateway, **fields).choices[0]
        deltas = [chunk.choices[0].delta for chunk in chat(gateway, stream=True, **fields)]
        content = "".join(delta.content or "" for delta in deltas)
        arguments = "".join(piece.function.arguments for delta in deltas for piece in delta.tool_calls or ())
        assert choice.finish_reason == reason
        if reason == "tool_calls":
            jsonschema.validate(json.loads(arguments), SCHEMA)
            assert (choice.message.content, content) == (None, "")
            assert choice.message.tool_calls[0].function.arguments == arguments
        else:
            jsonschema.validate(json.loads(content), ANSWER)
            assert (choice.message.content, arguments) == (content, "")


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


def test_none_is_a_chat_without_tools(gateway: GatewayCluster) -> None:
    def content(**fields: Any) -> Any:
        return chat(gateway, max_completion_tokens=30, **fields).choices[0].message.content

    assert content(tool_choice="none") == content(tools=[]) != content()


ENDS = {"length": ("max_tokens", "incomplete"), "stop": ("end_turn", "completed")}


@pytest.mark.parametrize("seed", [SEED, 11])
def test_messages_and_responses_are_the_chat_s_text(gateway: GatewayCluster, claude: Anthropic, seed: int) -> None:
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


def test_the_first_event_counts_the_prompt(claude: Anthropic) -> None:
    counted = claude.messages.count_tokens(model=MODEL, messages=ASKED, tools=[CLAUDE_TOOL]).input_tokens
    stream = claude.messages.create(model=MODEL, max_tokens=2, messages=ASKED, tools=[CLAUDE_TOOL], stream=True)
    first = next(iter(stream))
    assert first.type == "message_start"
    assert first.message.usage.input_tokens == counted > len(json.dumps(SCHEMA))


def test_anthropic_s_tools(claude: Anthropic) -> None:
    fields: Any = {"model": MODEL, "tools": [CLAUDE_TOOL], "extra_body": {"seed": SEED}}
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    whole = claude.messages.create(**fields, messages=ASKED, max_tokens=200, tool_choice=choice)
    with claude.messages.stream(**fields, messages=ASKED, max_tokens=200, tool_choice=choice) as stream:
        final = stream.get_final_message()
    for message in (whole, final):
        block: Any = message.content[0]
        assert len(message.content) == 1
        assert (message.stop_reason, block.type) == ("tool_use", "tool_use")
        jsonschema.validate(block.input, SCHEMA)
    result = {"type": "tool_result", "tool_use_id": whole.content[0].id, "content": "wet"}
    used = {"role": "assistant", "content": [whole.content[0].model_dump(exclude_none=True)]}
    turns: Any = [*ASKED, used, {"role": "user", "content": [result]}]
    assert claude.messages.create(**fields, messages=turns, max_tokens=5).usage.output_tokens <= 5


def test_a_response_s_function_call(gateway: GatewayCluster) -> None:
    tool = {"type": "function", "strict": True, **FUNCTION}
    fields: Any = {"model": MODEL, "tools": [tool], "parallel_tool_calls": False, "extra_body": {"seed": SEED}}
    whole = gateway.openai.responses.create(**fields, input=ASKED, tool_choice="required")
    (item,) = whole.output
    assert (item.type, whole.status) == ("function_call", "completed")
    jsonschema.validate(json.loads(item.arguments), SCHEMA)
    output = {"type": "function_call_output", "call_id": item.call_id, "output": "wet"}
    turns = [*ASKED, item.model_dump(exclude_none=True), output]
    again = gateway.openai.responses.create(**fields, input=turns, max_output_tokens=10)
    assert 1 <= again.usage.output_tokens <= 10
