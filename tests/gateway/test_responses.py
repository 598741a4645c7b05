"""OpenAI's Responses over its chat: requests by hand, replies as the official client reads them."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from pydantic import ValidationError

from paceline_gateway.dialects.responses_reply import ResponseEvents, response_of
from paceline_gateway.dialects.responses_request import chat_of_response
from paceline_gateway.dialects.responses_types import ResponsesRequest
from tests.gateway.chat_chunks import Answer, call, chunk, completion, ended, http_client

ASKED: Any = {"model": "m", "input": "q"}
TOOL = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": None}


def request(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({**ASKED, **fields})


def chat(**fields: Any) -> dict[str, Any]:
    return {**chat_of_response(request(**fields)).chat}


def client(answer: Answer) -> openai.OpenAI:
    return openai.OpenAI(api_key="k", base_url="http://localhost/v1", http_client=http_client(answer), max_retries=0)


def test_fields_and_their_names() -> None:
    asked = chat(
        instructions="i",
        max_output_tokens=9,
        temperature=0.5,
        tools=[TOOL],
        tool_choice={"type": "function", "name": "add"},
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        stream=True,
    )
    assert asked == {
        "model": "m",
        "messages": [{"role": "system", "content": "i"}, {"role": "user", "content": "q"}],
        "max_completion_tokens": 9,
        "temperature": 0.5,
        "tools": [
            {
                "type": "function",
                "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
            }
        ],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_items_of_one_answer_are_one_message() -> None:
    called = {"type": "function_call", "name": "add", "arguments": "{}"}
    said = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "so", "annotations": []}],
    }
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
        thought,
        said,
        {**called, "call_id": "c1"},
        {**called, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        said,
        said,
    ]
    user, answer, result, again, more = chat(input=items)["messages"]
    assert user == {"role": "user", "content": "q"}
    assert (answer["reasoning_content"], answer["content"]) == ("hm", "so")
    assert [made["id"] for made in answer["tool_calls"]] == ["c1", "c2"]
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "2"}
    assert again == more == {"role": "assistant", "content": "so"}


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "i"}]}, "input"),
        ({"reasoning": {"effort": "much"}}, "reasoning"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
def test_what_the_shape_has_no_place_for_is_named(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(ValidationError) as caught:
        request(**fields)
    assert caught.value.errors()[0]["loc"][0] == where


def test_a_whole_response() -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
    said = {"content": "so", "reasoning_content": "hm", "tool_calls": calls}
    response = client(lambda body: response_of(request(**body), completion(said, "tool_calls"))).responses.create(
        **ASKED, temperature=0.5
    )
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert response.output_text == "so"
    assert (response.status, response.temperature, response.usage.input_tokens) == ("completed", 0.5, 9)
    assert response.output[2].arguments == '{"a": 1}'
    assert response.usage.input_tokens_details.cached_tokens == 4


def test_a_response_that_was_cut_off_says_so() -> None:
    response = response_of(request(), completion({"content": "so"}, "length"))
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"


def streamed(*chunks: dict[str, Any]) -> list[dict[str, Any]]:
    events = ResponseEvents(request())
    return [event for one in chunks for event in events.feed(one)] + events.finish()


def test_a_stream_in_the_official_client() -> None:
    deltas = [{"reasoning_content": "hm"}, {"content": "s"}, {"content": "o"}]
    calls = [call(0, "add"), call(0, arguments='{"a":'), call(0, arguments=" 1}")]
    made = streamed(*ended(*deltas, *calls))
    with client(lambda body: made).responses.stream(**ASKED) as stream:
        seen = [event.type for event in stream]
        response = stream.get_final_response()
    assert response.output_text == "so"
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert seen[0] == "response.created"
    assert seen[-1] == "response.completed"


def test_events_are_numbered_and_what_was_sent_doesn_t_grow() -> None:
    made = streamed(*ended({"content": "s"}, {"content": "o"}))
    assert [event["sequence_number"] for event in made] == list(range(len(made)))
    added = next(event for event in made if event["type"] == "response.output_item.added")
    assert added["item"]["content"] == []
    done = next(event for event in made if event["type"] == "response.output_text.done")
    assert done["text"] == "so"


def test_an_error_in_mid_stream_fails_the_response() -> None:
    events = ResponseEvents(request())
    made = events.feed(chunk({"content": "s"})) + events.fail(503, {"error": {"message": "gone"}})
    assert made[-1]["type"] == "response.failed"
    assert made[-1]["response"]["error"] == {"code": "server_error", "message": "gone"}
    assert made[-1]["response"]["output"][0]["content"][0]["text"] == "s"
