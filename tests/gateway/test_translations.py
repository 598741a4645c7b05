"""Anthropic's Messages and OpenAI's Responses over its chat; replies as official clients read them: `test_canned`."""

from __future__ import annotations

from typing import Any

from paceline_gateway.dialects.anthropic_reply import message_of
from paceline_gateway.dialects.anthropic_request import chat_of_messages
from paceline_gateway.dialects.anthropic_types import MessagesRequest
from paceline_gateway.dialects.responses_request import chat_of_response
from paceline_gateway.dialects.responses_types import ResponsesRequest

TURNS = [{"role": "user", "content": "q"}]
CLAUDES = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
FLAT = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": None}


def of_messages(**fields: Any) -> dict[str, Any]:
    asked = MessagesRequest.model_validate({"model": "m", "max_tokens": 9, "messages": TURNS, **fields})
    return {**chat_of_messages(asked, has_reasoning=False).chat}


def of_response(**fields: Any) -> dict[str, Any]:
    return {**chat_of_response(ResponsesRequest.model_validate({"model": "m", "input": "q", **fields})).chat}


def test_fields_of_messages() -> None:
    system = [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}]
    same = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "stream": True, "seed": 7}
    assert of_messages(system=system, stop_sequences=["x"], metadata={"user_id": "u"}, **same) == same | {
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
    turns = of_messages(messages=[*TURNS, said, {"role": "user", "content": blocks}])["messages"]
    answer, *results, more = turns[1:]
    assert (answer["reasoning_content"], answer["content"]) == ("hm", "so")
    assert answer["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert [(turn["role"], turn["content"]) for turn in results] == [("tool", "2"), ("tool", "Error: no")]
    assert more == {"role": "user", "content": [{"type": "text", "text": "and?"}]}


def test_tool_choice() -> None:
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    named = {"type": "function", "function": {"name": "add"}}
    choices = {"auto": "auto", "any": "required", "none": "none", "tool": named}
    for kind, expected in choices.items():
        choice = {"type": kind} | ({"name": "add"} if kind == "tool" else {})
        asked = of_messages(tools=[CLAUDES], tool_choice=choice)
        assert asked["tools"] == [{"type": "function", "function": function}]
        assert asked["tool_choice"] == expected
        assert "parallel_tool_calls" not in asked
        alone = of_messages(tools=[CLAUDES], tool_choice={**choice, "disable_parallel_tool_use": True})
        assert alone["parallel_tool_calls"] is False


def test_arguments_that_are_no_json_stay_text() -> None:
    calls = [{"id": "c1", "function": {"name": "add", "arguments": '{"a": '}}]
    reply = {"role": "assistant", "content": None, "tool_calls": calls}
    choice = {"index": 0, "message": reply, "finish_reason": "tool_calls"}
    usage = {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
    message = message_of({"id": "chatcmpl-7f", "model": "m", "created": 7, "choices": [choice], "usage": usage})
    assert message["content"] == [{"type": "text", "text": 'add {"a": '}]


def test_fields_of_a_response() -> None:
    schema = {"type": "object"}
    same = {"temperature": 0.5, "parallel_tool_calls": False, "stream": True}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    choice = {"type": "function", "name": "add"}
    asked = of_response(instructions="i", max_output_tokens=9, tools=[FLAT], tool_choice=choice, text=text, **same)
    assert asked == same | {
        "model": "m",
        "messages": [{"role": "system", "content": "i"}, {"role": "user", "content": "q"}],
        "max_completion_tokens": 9,
        "tools": [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": schema}}],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        "stream_options": {"include_usage": True},
    }


def test_items_of_one_answer_are_one_message() -> None:
    called = {"type": "function_call", "name": "add", "arguments": "{}"}
    text = {"type": "output_text", "text": "so", "annotations": []}
    said = {"type": "message", "role": "assistant", "content": [text]}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    calls = [{**called, "call_id": each} for each in ("c1", "c2")]
    output = {"type": "function_call_output", "call_id": "c1", "output": "2"}
    asked = {"role": "user", "content": [{"type": "input_text", "text": "q"}]}
    items = [asked, thought, said, *calls, output, said, said]
    user, answer, result, again, more = of_response(input=items)["messages"]
    assert user == {"role": "user", "content": "q"}
    assert (answer["reasoning_content"], answer["content"]) == ("hm", "so")
    assert [made["id"] for made in answer["tool_calls"]] == ["c1", "c2"]
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "2"}
    assert again == more == {"role": "assistant", "content": "so"}
