"""OpenAI's Responses over its chat; `test_canned` has replies as the official client reads them."""

from __future__ import annotations

from typing import Any

from paceline_gateway.dialects.responses_request import chat_of_response
from paceline_gateway.dialects.responses_types import ResponsesRequest

ASKED: Any = {"model": "m", "input": "q"}
TOOL = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": None}


def chat(**fields: Any) -> dict[str, Any]:
    return {**chat_of_response(ResponsesRequest.model_validate({**ASKED, **fields})).chat}


def test_fields_and_their_names() -> None:
    schema = {"type": "object"}
    same = {"temperature": 0.5, "parallel_tool_calls": False, "stream": True}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    choice = {"type": "function", "name": "add"}
    asked = chat(instructions="i", max_output_tokens=9, tools=[TOOL], tool_choice=choice, text=text, **same)
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
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
        thought,
        said,
        *calls,
        output,
        said,
        said,
    ]
    user, answer, result, again, more = chat(input=items)["messages"]
    assert user == {"role": "user", "content": "q"}
    assert (answer["reasoning_content"], answer["content"]) == ("hm", "so")
    assert [made["id"] for made in answer["tool_calls"]] == ["c1", "c2"]
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "2"}
    assert again == more == {"role": "assistant", "content": "so"}
