"""Calls that a limit or a stop string cuts, in every API: what had come of them, and no mark of them in the text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.protocol.generation import FinishReason
from tests.gateway.canned import ASKED, serving
from tests.gateway.templates import DEEPSEEK, HERMES, LLAMA, MISTRAL, QWEN

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
FLAT: Any = {"type": "function", "name": "add", "parameters": SCHEMA}
CLAUDES: Any = {"name": "add", "input_schema": SCHEMA}
WHOLE = {
    HERMES: '<tool_call>\n{"name": "add", "arguments": {"a": "xyz"}}\n</tool_call>',
    MISTRAL: '[TOOL_CALLS] [{"name": "add", "arguments": {"a": "xyz"}}]',
    LLAMA: '{"name": "add", "parameters": {"a": "xyz"}}',
    QWEN: "<tool_call>\n<function=add>\n<parameter=a>\nxyz\n</parameter>\n</function>\n</tool_call>",
    DEEPSEEK: '<|calls|><|call|>function<|sep|>add\n```json\n{"a": "xyz"}\n```<|end|><|ends|>',
}


@pytest.mark.parametrize("template", WHOLE, ids=["hermes", "mistral", "llama", "qwen", "deepseek"])
async def test_no_mark_of_a_call_that_must_come_is_content_wherever_it_is_cut(template: str) -> None:
    asked: Any = {"model": "m", "messages": ASKED, "tools": [TOOL], "tool_choice": "required"}
    async with serving(template, "") as served:
        served.canned.ended = FinishReason.LENGTH
        for end in range(1, len(WHOLE[template]), 11):
            served.canned.text = cut = WHOLE[template][:end]
            choice = (await served.openai.chat.completions.create(**asked)).choices[0]
            stream = await served.openai.chat.completions.create(**asked, stream=True)
            deltas = [chunk.choices[0].delta async for chunk in stream]
            assert (choice.finish_reason, choice.message.content or "") == ("length", ""), cut
            pieces = [call.function.arguments for delta in deltas for call in delta.tool_calls or ()]
            assert "".join(delta.content or "" for delta in deltas) == "", cut
            whole = [call.function.arguments for call in choice.message.tool_calls or ()]
            assert "".join(whole) == "".join(pieces), cut


async def test_a_cut_call_is_told_as_such_in_every_api() -> None:
    arguments = '{"a": "xy", "b": 1, "c": [2, 3'
    async with serving(HERMES, f'<tool_call>\n{{"name": "add", "arguments": {arguments}') as served:
        served.canned.ended = FinishReason.LENGTH
        any_tool: Any = {"max_tokens": 9, "tools": [CLAUDES], "tool_choice": {"type": "any"}}
        choice = (await served.openai.chat.completions.create(model="m", messages=ASKED, tools=[TOOL])).choices[0]
        message = await served.claude.messages.create(model="m", messages=ASKED, **any_tool)
        async with served.claude.messages.stream(model="m", messages=ASKED, **any_tool) as events:
            streamed = await events.get_final_message()
        required: Any = {"tools": [FLAT], "tool_choice": "required"}
        response = await served.openai.responses.create(model="m", input="q", **required)
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name, call.function.arguments) == ("length", "add", arguments)
    for each in (message, streamed):
        assert [block.type for block in each.content] == ["tool_use"]
        assert (each.stop_reason, each.content[0].input) == ("max_tokens", {"a": "xy", "b": 1, "c": [2, 3]})
    (item,) = response.output
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (item.type, item.status, item.arguments) == ("function_call", "incomplete", arguments)


@pytest.mark.parametrize("end", [5, 11, 13, 22, 28])
async def test_a_call_in_free_text_that_is_cut_leaves_no_mark_once_its_marker_has_come(end: int) -> None:
    async with serving(HERMES, "So:\n" + WHOLE[HERMES][:end]) as served:
        served.canned.ended = FinishReason.LENGTH
        made = await served.openai.chat.completions.create(model="m", messages=ASKED, tools=[TOOL])
    choice = made.choices[0]
    marker = "<tool_call>"
    left = "" if end >= len(marker) else "\n" + marker[:end]
    assert (choice.finish_reason, choice.message.content) == ("length", "So:" + left), "that may have been text"


async def test_what_the_model_ends_itself_is_content_as_before() -> None:
    async with serving(HERMES, 'So: <tool_call>\n{"name": "add"') as served:
        made = await served.openai.chat.completions.create(model="m", messages=ASKED, tools=[TOOL])
    assert made.choices[0].message.content == 'So: <tool_call>\n{"name": "add"'


async def test_a_stop_string_inside_a_call_ends_no_whole_call() -> None:
    async with serving(HERMES, WHOLE[HERMES]) as served:
        fields: Any = {"model": "m", "messages": ASKED, "tools": [TOOL]}
        inside = (await served.openai.chat.completions.create(**fields, stop=["yz"])).choices[0]
        behind = (await served.openai.chat.completions.create(**fields, stop=["</tool_call>"])).choices[0]
    assert (inside.finish_reason, inside.stop_reason) == ("stop", "yz")
    assert inside.message.tool_calls[0].function.arguments == '{"a": "x'
    assert (behind.finish_reason, behind.message.content) == ("tool_calls", None)
    assert json.loads(behind.message.tool_calls[0].function.arguments) == {"a": "xyz"}
