"""Anthropic's messages over OpenAI's chat: requests by hand, replies as the official client reads them."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from pydantic import ValidationError

from paceline.protocol.errors import InvalidInput
from paceline_gateway.dialects.anthropic_reply import MessageEvents, error_of, message_of
from paceline_gateway.dialects.anthropic_request import chat_of_messages
from paceline_gateway.dialects.anthropic_types import MessagesRequest
from tests.gateway.chat_chunks import Answer, call, chunk, completion, ended, http_client

ASKED: Any = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "q"}]}
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}


def chat(*, has_reasoning: bool = False, **fields: Any) -> dict[str, Any]:
    return {**chat_of_messages(MessagesRequest.model_validate({**ASKED, **fields}), has_reasoning=has_reasoning).chat}


def client(answer: Answer) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        api_key="k", base_url="http://localhost", http_client=http_client(answer), max_retries=0
    )


def test_fields_and_their_names() -> None:
    asked = chat(
        system=[{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        stop_sequences=["x"],
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        metadata={"user_id": "u"},
        stream=True,
        seed=7,
    )
    assert asked == {
        "model": "m",
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
        "max_completion_tokens": 9,
        "stop": ["x"],
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "seed": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_calls_and_results_keep_their_order() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}
    asked = chat(
        messages=[
            {"role": "user", "content": "q"},
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "so"}, use],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "2"}]},
                    {"type": "tool_result", "tool_use_id": "t2", "content": "no", "is_error": True},
                    {"type": "text", "text": "and?"},
                ],
            },
        ]
    )
    answer, *results, more = asked["messages"][1:]
    assert (answer["reasoning_content"], answer["content"]) == ("hm", "so")
    assert answer["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert [(turn["role"], turn["content"]) for turn in results] == [("tool", "2"), ("tool", "Error: no")]
    assert more == {"role": "user", "content": [{"type": "text", "text": "and?"}]}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
    ],
)
def test_tool_choice(choice: dict[str, Any], expected: Any) -> None:
    asked = chat(tools=[TOOL], tool_choice=choice)
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    assert asked["tools"] == [{"type": "function", "function": function}]
    assert asked["tool_choice"] == expected
    assert "parallel_tool_calls" not in asked
    alone = chat(tools=[TOOL], tool_choice={**choice, "disable_parallel_tool_use": True})
    assert alone["parallel_tool_calls"] is False


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "messages"),
        ({"thinking": {"type": "forced"}}, "thinking"),
        ({"mcp_servers": [{"type": "url", "url": "u", "name": "n"}]}, "mcp_servers"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"container": "c"}, "container"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"output_config": {"effort": "much"}}, "output_config"),
    ],
)
def test_what_the_shape_has_no_place_for_is_named(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(ValidationError) as caught:
        MessagesRequest.model_validate({**ASKED, **fields})
    assert caught.value.errors()[0]["loc"][0] == where


def test_what_can_t_be_kept_is_refused() -> None:
    with pytest.raises(InvalidInput, match="prefill"):
        chat(messages=[*ASKED["messages"], {"role": "assistant", "content": "So"}])
    with pytest.raises(InvalidInput, match=r"tool_choice.name"):
        chat(tools=[TOOL], tool_choice={"type": "tool"})
    turns = [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}, TEXT]},
        *USER,
    ]
    with pytest.raises(InvalidInput, match=r"messages.0.content"):
        chat(messages=turns)


TEXT = {"type": "text", "text": "behind"}
USER = [{"role": "user", "content": "q"}]


def test_a_whole_message() -> None:
    calls = [{"id": "c1", "function": {"name": "add", "arguments": '{"a": 1}'}}]
    said = {"content": "so", "reasoning_content": "hm", "tool_calls": calls}
    message = client(lambda body: message_of(completion(said, "tool_calls"))).messages.create(**ASKED)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.content[2].input == {"a": 1}
    assert (message.stop_reason, message.usage.input_tokens, message.usage.cache_read_input_tokens) == (
        "tool_use",
        5,
        4,
    )


@pytest.mark.parametrize(
    ("reason", "matched", "expected"),
    [("stop", None, "end_turn"), ("stop", "x", "stop_sequence"), ("length", None, "max_tokens")],
)
def test_why_it_stopped(reason: str, matched: str | None, expected: str) -> None:
    message = message_of(completion({"content": "so"}, reason, stop_reason=matched))
    assert (message["stop_reason"], message["stop_sequence"]) == (expected, matched)


def test_arguments_that_are_no_json_stay_text() -> None:
    calls = [{"id": "c1", "function": {"name": "add", "arguments": '{"a": '}}]
    message = message_of(completion({"content": None, "tool_calls": calls}, "tool_calls"))
    assert message["content"] == [{"type": "text", "text": 'add {"a": '}]


def test_a_call_that_was_cut_off_is_what_the_official_client_reads_of_a_stream() -> None:
    arguments = '{"a": 1, "b": "x", "c": [2, 3'
    calls = [{"id": "call0", "function": {"name": "add", "arguments": arguments}}]
    whole = message_of(completion({"content": None, "tool_calls": calls}, "length"))

    def answer(body: dict[str, Any]) -> list[Any]:
        events = MessageEvents()
        fed = [event for one in ended(call(0, "add", arguments), reason="length") for event in events.feed(one)]
        return [*fed, *events.finish()]

    with client(answer).messages.stream(**ASKED) as stream:
        message = stream.get_final_message()
    block: Any = message.content[0]
    assert (message.stop_reason, block.type) == ("max_tokens", "tool_use")
    assert block.input == whole["content"][0]["input"] == {"a": 1, "b": "x", "c": [2, 3]}
    assert whole["stop_reason"] == "max_tokens"


def test_a_stream_in_the_official_client() -> None:
    deltas = [{"reasoning_content": "h"}, {"reasoning_content": "m"}, {"content": "s"}, {"content": "o"}]
    calls = [call(0, "add"), call(0, arguments='{"a":'), call(0, arguments=" 1}"), call(1, "now", "{}")]

    def answer(body: dict[str, Any]) -> list[Any]:
        events = MessageEvents()
        fed = [event for one in ended(*deltas, *calls, reason="tool_calls") for event in events.feed(one)]
        return [*fed, *events.finish()]

    with client(answer).messages.stream(**ASKED) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == "so"
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block.input for block in message.content if block.type == "tool_use"] == [{"a": 1}, {}]
    assert (message.stop_reason, message.usage.input_tokens, message.usage.output_tokens) == ("tool_use", 5, 5)


def test_a_stream_s_events_nest() -> None:
    events = MessageEvents()
    made = [event for one in ended({"content": "a"}, call(0, "add")) for event in events.feed(one)] + events.finish()
    assert [event["type"] for event in made] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_an_error_in_mid_stream_is_the_client_s_exception() -> None:
    events = MessageEvents()
    made = events.feed(chunk({"content": "a"})) + events.fail(503, {"error": {"message": "gone"}})
    with pytest.raises(anthropic.APIStatusError, match="gone"):
        list(client(lambda body: made).messages.create(**ASKED, stream=True))


def test_an_error_has_anthropic_s_type() -> None:
    shown = {**error_of(429, {"error": {"message": "later"}}), "http_status": 429}
    with pytest.raises(anthropic.RateLimitError, match="later"):
        client(lambda body: dict(shown)).messages.create(**ASKED)
