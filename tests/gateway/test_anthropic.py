"""Anthropic's messages over OpenAI's chat; `test_canned` has replies as the official client reads them."""

from __future__ import annotations

from typing import Any

from paceline_gateway.dialects.anthropic_reply import message_of
from paceline_gateway.dialects.anthropic_request import chat_of_messages
from paceline_gateway.dialects.anthropic_types import MessagesRequest

ASKED: Any = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "q"}]}
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}


def chat(**fields: Any) -> dict[str, Any]:
    return {**chat_of_messages(MessagesRequest.model_validate(ASKED | fields), has_reasoning=False).chat}


def test_fields_and_their_names() -> None:
    system = [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}]
    same = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "stream": True, "seed": 7}
    assert chat(system=system, stop_sequences=["x"], metadata={"user_id": "u"}, **same) == same | {
        "model": "m",
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
        "max_completion_tokens": 9,
        "stop": ["x"],
        "stream_options": {"include_usage": True},
    }


def test_calls_and_results_keep_their_order() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}
    thought = {"type": "thinking", "thinking": "hm"}
    blocks = [
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "2"}]},
        {"type": "tool_result", "tool_use_id": "t2", "content": "no", "is_error": True},
        {"type": "text", "text": "and?"},
    ]
    said = {"role": "assistant", "content": [thought, {"type": "text", "text": "so"}, use]}
    turns = chat(messages=[*ASKED["messages"], said, {"role": "user", "content": blocks}])["messages"]
    answer, *results, more = turns[1:]
    assert (answer["reasoning_content"], answer["content"]) == ("hm", "so")
    assert answer["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert [(turn["role"], turn["content"]) for turn in results] == [("tool", "2"), ("tool", "Error: no")]
    assert more == {"role": "user", "content": [{"type": "text", "text": "and?"}]}


def test_tool_choice() -> None:
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    choices = {
        "auto": "auto",
        "any": "required",
        "none": "none",
        "tool": {"type": "function", "function": {"name": "add"}},
    }
    for kind, expected in choices.items():
        choice = {"type": kind} | ({"name": "add"} if kind == "tool" else {})
        asked = chat(tools=[TOOL], tool_choice=choice)
        assert asked["tools"] == [{"type": "function", "function": function}]
        assert asked["tool_choice"] == expected
        assert "parallel_tool_calls" not in asked
        alone = chat(tools=[TOOL], tool_choice={**choice, "disable_parallel_tool_use": True})
        assert alone["parallel_tool_calls"] is False


def test_arguments_that_are_no_json_stay_text() -> None:
    calls = [{"id": "c1", "function": {"name": "add", "arguments": '{"a": '}}]
    reply = {"role": "assistant", "content": None, "tool_calls": calls}
    choice = {"index": 0, "message": reply, "finish_reason": "tool_calls"}
    usage = {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
    message = message_of({"id": "chatcmpl-7f", "model": "m", "created": 7, "choices": [choice], "usage": usage})
    assert message["content"] == [{"type": "text", "text": 'add {"a": '}]
