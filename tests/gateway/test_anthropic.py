"""Anthropic's messages over OpenAI's chat; `test_canned` has replies as the official client reads them."""

from __future__ import annotations

from typing import Any

import pytest

from paceline_gateway.dialects.anthropic_reply import MessageEvents, message_of
from paceline_gateway.dialects.anthropic_request import chat_of_messages
from paceline_gateway.dialects.anthropic_types import MessagesRequest
from tests.gateway.chat_chunks import call, completion, ended

ASKED: Any = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "q"}]}
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}


def chat(*, has_reasoning: bool = False, **fields: Any) -> dict[str, Any]:
    return {**chat_of_messages(MessagesRequest.model_validate({**ASKED, **fields}), has_reasoning=has_reasoning).chat}


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
    thought = {"type": "thinking", "thinking": "hm"}
    asked = chat(
        messages=[
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": [thought, {"type": "text", "text": "so"}, use]},
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


def test_a_stream_s_events_nest() -> None:
    events = MessageEvents()
    made = [event for one in ended({"content": "a"}, call(0, "add")) for event in events.feed(one)] + events.finish()
    text, use = ("start", "delta", "stop"), ("start", "stop")
    blocks = [f"content_block_{each}" for each in (*text, *use)]
    assert [event["type"] for event in made] == ["message_start", "ping", *blocks, "message_delta", "message_stop"]
