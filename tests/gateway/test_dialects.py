"""Tools and the further dialects through a whole gateway, with the official clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
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
CALL: Any = {
    "id": "c1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Kiel", "days": 2}'},
}
SEED = 7


@pytest.fixture(scope="module")
def claude(gateway: GatewayCluster) -> Iterator[Anthropic]:
    address = f"http://{gateway.address_of('gateway')}"
    with Anthropic(api_key="any", base_url=address, max_retries=0, timeout=20) as client:
        yield client


def chat(gateway: GatewayCluster, **fields: Any) -> Any:
    given = {"model": MODEL, "messages": ASKED, "seed": SEED, "max_completion_tokens": 200, "tools": [TOOL]}
    return gateway.openai.chat.completions.create(**(given | fields))


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


ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {"wet": {"type": "boolean"}},
    "required": ["wet"],
    "additionalProperties": False,
}
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
    given = {"messages": ASKED, "max_tokens": 50, "tools": [TOOL], "stream": stream}
    answer = gateway.post("/v1/chat/completions", given | fields)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert "#/minProperties: must be at most 1" in answer.error["message"]
    assert chat(gateway, response_format=FORMAT).choices[0].finish_reason in ENDS, "the next one is served"


def test_a_free_reply_to_a_result_is_text(gateway: GatewayCluster) -> None:
    turns = [
        *ASKED,
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "wet"},
    ]
    choice = chat(gateway, messages=turns, max_completion_tokens=30).choices[0]
    assert choice.finish_reason in ENDS
    assert choice.message.tool_calls is None


def test_none_is_a_chat_without_tools(gateway: GatewayCluster) -> None:
    fields = {"max_completion_tokens": 30}
    without = chat(gateway, tools=[], **fields)
    assert (
        chat(gateway, tool_choice="none", **fields).choices[0].message.content == without.choices[0].message.content
    )
    assert chat(gateway, **fields).choices[0].message.content != without.choices[0].message.content


def told_letter(gateway: GatewayCluster) -> tuple[int, str]:
    """A seed, and a letter in the middle of its text."""
    for seed in range(50):
        text = chat(gateway, tools=[], seed=seed, max_completion_tokens=60).choices[0].message.content
        for letter in text[5:]:
            if letter.isascii() and letter.isalnum() and letter not in text[:5]:
                return seed, letter
    raise AssertionError("no text has a letter")


def test_which_stop_string_ended_it_is_told(gateway: GatewayCluster, claude: Anthropic) -> None:
    seed, stop = told_letter(gateway)
    choice = chat(gateway, tools=[], seed=seed, max_completion_tokens=60, stop=["\x00never", stop]).choices[0]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    message = claude.messages.create(
        model=MODEL, max_tokens=60, messages=ASKED, stop_sequences=[stop], extra_body={"seed": seed}
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == choice.message.content  # type: ignore[union-attr]


ENDS = {"length": ("max_tokens", "incomplete"), "stop": ("end_turn", "completed")}


def wanted_chat(gateway: GatewayCluster, seed: int) -> tuple[str, int, tuple[str, str]]:
    """Text, tokens, and how the other APIs tell its end."""
    asked = chat(gateway, tools=[], seed=seed, max_completion_tokens=40)
    (choice,) = asked.choices
    return choice.message.content, asked.usage.completion_tokens, ENDS[choice.finish_reason]


@pytest.mark.parametrize("seed", [SEED, 11])
def test_anthropic_s_message_is_the_chat_s_text(gateway: GatewayCluster, claude: Anthropic, seed: int) -> None:
    text, tokens, (ended, _) = wanted_chat(gateway, seed)
    given: Any = {"model": MODEL, "max_tokens": 40, "messages": ASKED, "extra_body": {"seed": seed}}
    whole = claude.messages.create(**given)
    with claude.messages.stream(**given) as stream:
        assert "".join(stream.text_stream) == text == whole.content[0].text
        final = stream.get_final_message()
    counted = claude.messages.count_tokens(model=MODEL, messages=ASKED).input_tokens
    for message in (whole, final):
        assert (message.stop_reason, message.usage.output_tokens) == (ended, tokens)
        assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == counted


def test_the_first_event_counts_the_prompt(claude: Anthropic) -> None:
    counted = claude.messages.count_tokens(model=MODEL, messages=ASKED, tools=[CLAUDE_TOOL]).input_tokens
    stream = claude.messages.create(model=MODEL, max_tokens=2, messages=ASKED, tools=[CLAUDE_TOOL], stream=True)
    first = next(iter(stream))
    assert first.type == "message_start"
    assert first.message.usage.input_tokens == counted > len(json.dumps(SCHEMA))


def test_a_key_that_can_t_be_sent_is_refused_in_each_shape(gateway: GatewayCluster) -> None:
    for path, shape in (("/v1/messages", "type"), ("/v1/responses", "error")):
        answer = gateway.post(path, {}, x_api_key="a b")
        assert answer.status == 401
        assert next(iter(answer.json)) == shape


def test_anthropic_s_tools(claude: Anthropic) -> None:
    given: Any = {
        "model": MODEL,
        "max_tokens": 200,
        "messages": ASKED,
        "tools": [CLAUDE_TOOL],
        "extra_body": {"seed": SEED},
    }
    given["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
    whole = claude.messages.create(**given)
    with claude.messages.stream(**given) as stream:
        final = stream.get_final_message()
    for message in (whole, final):
        block: Any = message.content[0]
        assert len(message.content) == 1
        assert (message.stop_reason, block.type) == ("tool_use", "tool_use")
        jsonschema.validate(block.input, SCHEMA)
    result = {"type": "tool_result", "tool_use_id": whole.content[0].id, "content": "wet"}
    turns = [*ASKED, {"role": "assistant", "content": [whole.content[0].model_dump(exclude_none=True)]}]
    turns.append({"role": "user", "content": [result]})
    del given["tool_choice"]
    assert claude.messages.create(**(given | {"messages": turns, "max_tokens": 5})).usage.output_tokens <= 5


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"model": "other"}, anthropic.NotFoundError, "model"),
        ({"messages": [{"role": "assistant", "content": "So"}]}, anthropic.BadRequestError, "prefill"),
        ({"thinking": {"type": "forced"}}, anthropic.BadRequestError, "thinking"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
            anthropic.BadRequestError,
            "image",
        ),
        ({"extra_body": {"temperature": 1000}}, anthropic.BadRequestError, "temperature"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_s_errors(
    claude: Anthropic,
    fields: dict[str, Any],
    error: type[anthropic.APIStatusError],
    message: str,
    stream: bool,
) -> None:
    given: Any = {"model": MODEL, "max_tokens": 5, "messages": ASKED, "stream": stream} | fields
    with pytest.raises(error, match=message) as caught:
        claude.messages.create(**given)
    body: Any = caught.value.body
    assert (body["type"], set(body["error"])) == ("error", {"type", "message"})


@pytest.mark.parametrize("seed", [SEED, 11])
def test_a_response_is_the_chat_s_text(gateway: GatewayCluster, seed: int) -> None:
    text, tokens, (_, ended) = wanted_chat(gateway, seed)
    given: Any = {"model": MODEL, "input": ASKED[0]["content"], "max_output_tokens": 40, "extra_body": {"seed": seed}}
    whole = gateway.openai.responses.create(**given)
    with gateway.openai.responses.stream(**given) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert whole.output_text == "".join(deltas) == text
    assert (whole.status, whole.usage.output_tokens) == (ended, tokens)


def test_a_response_s_function_call(gateway: GatewayCluster) -> None:
    tool = {"type": "function", "strict": True, **FUNCTION}
    given: Any = {
        "model": MODEL,
        "input": ASKED,
        "tools": [tool],
        "parallel_tool_calls": False,
        "extra_body": {"seed": SEED},
    }
    whole = gateway.openai.responses.create(**given, tool_choice="required")
    (item,) = whole.output
    assert (item.type, whole.status) == ("function_call", "completed")
    jsonschema.validate(json.loads(item.arguments), SCHEMA)
    output = {"type": "function_call_output", "call_id": item.call_id, "output": "wet"}
    turns = [*ASKED, item.model_dump(exclude_none=True), output]
    again = gateway.openai.responses.create(**(given | {"input": turns}), max_output_tokens=10)
    assert 1 <= again.usage.output_tokens <= 10


@pytest.mark.parametrize("field", ["previous_response_id", "conversation"])
def test_what_would_need_a_store_is_refused_by_name(gateway: GatewayCluster, field: str) -> None:
    answer = gateway.post("/v1/responses", {"model": MODEL, "input": "q", field: "x"})
    assert (answer.status, answer.error["param"]) == (400, field)
