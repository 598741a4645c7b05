"""Calls that a limit or a stop string cuts: what had come of them, and no mark of them in the text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.protocol.generation import FinishReason
from tests.gateway.canned import ASKED, serving
from tests.gateway.templates import DEEPSEEK, HERMES, LLAMA, MISTRAL, QWEN

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
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


async def test_a_call_in_free_text_that_is_cut_leaves_no_mark_once_its_marker_has_come() -> None:
    marker = "<tool_call>"
    asked: Any = {"model": "m", "messages": ASKED, "tools": [TOOL]}
    async with serving(HERMES, "") as served:
        for end in (5, len(marker), 13, 22, 28):
            served.canned.text, served.canned.ended = "So:\n" + WHOLE[HERMES][:end], FinishReason.LENGTH
            choice = (await served.openai.chat.completions.create(**asked)).choices[0]
            left = "" if end >= len(marker) else "\n" + marker[:end]
            assert (choice.finish_reason, choice.message.content) == ("length", "So:" + left), "that may be text"
        served.canned.ended = FinishReason.STOP
        choice = (await served.openai.chat.completions.create(**asked)).choices[0]
        assert choice.message.content == served.canned.text, "what the model ends itself is content"


async def test_a_stop_string_inside_a_call_ends_no_whole_call() -> None:
    async with serving(HERMES, WHOLE[HERMES]) as served:
        fields: Any = {"model": "m", "messages": ASKED, "tools": [TOOL]}
        inside = (await served.openai.chat.completions.create(**fields, stop=["yz"])).choices[0]
        behind = (await served.openai.chat.completions.create(**fields, stop=["</tool_call>"])).choices[0]
    assert (inside.finish_reason, inside.stop_reason) == ("stop", "yz")
    assert inside.message.tool_calls[0].function.arguments == '{"a": "x'
    assert (behind.finish_reason, behind.message.content) == ("tool_calls", None)
    assert json.loads(behind.message.tool_calls[0].function.arguments) == {"a": "xyz"}
