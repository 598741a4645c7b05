"""The chat path in one process, in formats of models that tests can't run."""

from __future__ import annotations

import json
import logging
from itertools import product
from typing import Any

import pydantic
import pytest

from paceline.models.tokenizer import TransformersTokenizer
from paceline.protocol.errors import InternalError
from paceline.protocol.generation import FinishReason
from paceline.runtime import metrics
from paceline_gateway.upstream.coordinators import Upstream
from tests.gateway.canned import ASKED, CACHED_TOKENS, JSON, serving
from tests.gateway.templates import HERMES, MISTRAL, OPENED, PLAIN, THINKING, templated

TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '{"name": "add", "arguments": {"a": 1}}'
LETTERS = THINKING.replace("think>", "reasoning>")
"""Its markers are no tokens of their own."""


def _tokens(tokenizer: TransformersTokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))


REASONED = {
    OPENED: {"hm é\n</think>\n\nYes.": "hm é\n"},
    THINKING: {
        "\n<think>hm</think>Yes <think>no</think>": "hm",
        "Yes.<think>hm</think>": "",
        "<think>cut off": "cut off",
    },
    HERMES: {"<think>hm</think>Yes.": ""},
    LETTERS: {" <reasoning>hm 12</reasoning>\nYes.": "hm 12", "<reasonable>hm</reasoning>": ""},
}
"""Replies by template, and what of them is reasoning."""


@pytest.mark.parametrize("template", REASONED, ids=["opened", "thinking", "hermes", "letters"])
async def test_reasoning_is_counted_by_its_tokens_whatever_text_waits(template: str) -> None:
    async with serving(template, "") as served:
        for (reply, reasoned), stop in product(REASONED[template].items(), (None, "</think>\n\nNo", "zz")):
            served.canned.text = reply
            made = await served.openai.chat.completions.create(model="m", messages=ASKED, stop=stop)
            response = await served.openai.responses.create(model="m", input="q")
            expected = _tokens(templated(template), reasoned)
            assert made.usage.completion_tokens == _tokens(templated(template), reply)
            assert made.usage.completion_tokens_details.reasoning_tokens == expected, (reply, stop)
            assert response.usage.output_tokens_details.reasoning_tokens == expected, reply


async def test_a_marker_that_the_text_leaves_out_is_seen() -> None:
    async with serving(MISTRAL, f"Let me see.[TOOL_CALLS] [{CALL}]") as served:
        choice = (await served.openai.chat.completions.create(model="m", messages=ASKED, tools=[TOOL])).choices[0]
        plain = (await served.openai.chat.completions.create(model="m", messages=ASKED)).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
    assert choice.message.tool_calls[0].function.arguments == '{"a": 1}'
    assert plain.message.content == f"Let me see. [{CALL}]"


@pytest.mark.parametrize(("template", "reasoning"), [(HERMES, ""), (OPENED, "hm\n</think>\n\n")])
async def test_reasoning_text_and_a_call_are_each_apis_own_whole_and_streamed(template: str, reasoning: str) -> None:
    tool: Any = {"name": "add", "input_schema": {"type": "object"}}
    flat: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
    chat: Any = {"model": "m", "messages": ASKED, "tools": [TOOL]}
    claude: Any = {"model": "m", "max_tokens": 99, "messages": ASKED, "tools": [tool]}
    items: Any = {"model": "m", "input": "q", "tools": [flat], "temperature": 0.5}
    async with serving(template, f"{reasoning}So:\n<tool_call>\n{CALL}\n</tool_call>") as served:
        choice = (await served.openai.chat.completions.create(**chat)).choices[0]
        stream = await served.openai.chat.completions.create(**chat, stream=True)
        choices = [chunk.choices[0] async for chunk in stream if chunk.choices]
        messages = [await served.claude.messages.create(**claude)]
        async with served.claude.messages.stream(**claude) as events:
            messages.append(await events.get_final_message())
        responses = [await served.openai.responses.create(**items)]
        async with served.openai.responses.stream(**items) as events:
            kinds = [event.type async for event in events]
            responses.append(await events.get_final_response())
    prompt_tokens = len(served.canned.asked[0].token_ids)
    thinks = bool(reasoning)
    assert (choice.message.content, choice.finish_reason, choice.stop_reason) == ("So:", "tool_calls", None)
    assert getattr(choice.message, "reasoning_content", None) == ("hm" if thinks else None)
    assert "".join(choice.delta.content or "" for choice in choices) == "So:"
    pieces = [piece.function.arguments for choice in choices for piece in choice.delta.tool_calls or ()]
    assert ("".join(pieces), choices[-1].finish_reason) == ('{"a": 1}', "tool_calls")
    for message in messages:
        *thoughts, text, use = message.content
        assert [block.thinking for block in thoughts] == ["hm"] * thinks
        assert (text.text, use.input, message.stop_reason) == ("So:", {"a": 1}, "tool_use")
        assert message.usage.cache_read_input_tokens == CACHED_TOKENS
        assert message.usage.input_tokens == prompt_tokens - CACHED_TOKENS
    for response in responses:
        assert [item.type for item in response.output] == ["reasoning"] * thinks + ["message", "function_call"]
        assert (response.output_text, response.output[-1].arguments) == ("So:", '{"a": 1}')
        assert (response.status, response.temperature) == ("completed", 0.5)
        assert response.usage.input_tokens == prompt_tokens
        assert response.usage.input_tokens_details.cached_tokens == CACHED_TOKENS
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert served.canned.asked[0].sampling.grammar is None


async def test_events_of_messages_nest_and_those_of_responses_are_numbered() -> None:
    claude = {"max_tokens": 99, "messages": ASKED, "tools": [CLAUDES], "stream": True}
    async with serving(HERMES, f"So:\n<tool_call>\n{CALL}\n</tool_call>") as served:
        answers = [
            await served.http.post("/v1/messages", json=claude),
            await served.http.post("/v1/responses", json={"input": "q", "stream": True}),
        ]
    lines = [[line[6:] for line in answer.text.splitlines() if line.startswith("data: {")] for answer in answers]
    nested, numbered = [[json.loads(line) for line in each] for each in lines]
    blocks = ["content_block_start", "content_block_stop"] * 2
    kinds = [event["type"] for event in nested if event["type"] != "content_block_delta"]
    assert kinds == ["message_start", "ping", *blocks, "message_delta", "message_stop"]
    assert [event["sequence_number"] for event in numbered] == [*range(len(numbered))]
    added = next(event for event in numbered if event["type"] == "response.output_item.added")
    done = next(event for event in numbered if event["type"] == "response.output_text.done")
    assert (added["item"]["content"], done["text"]) == ([], served.canned.text)


async def test_a_failure_is_each_clients_exception_in_mid_stream_too() -> None:
    async with serving(PLAIN, "Yes.") as served:
        served.canned.failure = InternalError("a defect")
        with pytest.raises(served.anthropic.InternalServerError, match="a defect"):
            await served.claude.messages.create(model="m", max_tokens=9, messages=ASKED)
        with pytest.raises(served.anthropic.APIStatusError, match="a defect"):
            async for _ in await served.claude.messages.create(model="m", max_tokens=9, messages=ASKED, stream=True):
                pass
        events = [event async for event in await served.openai.responses.create(model="m", input="q", stream=True)]
    failed = events[-1]
    assert (failed.type, failed.response.error.message) == ("response.failed", "a defect")
    assert failed.response.output[0].content[0].text == "Y"


async def test_the_stop_string_that_ended_it_is_told() -> None:
    async with serving(HERMES, "one two three") as served:
        create = served.openai.chat.completions.create
        choice = (await create(model="m", messages=ASKED, stop=["thr", " two"])).choices[0]
        message = await served.claude.messages.create(model="m", max_tokens=9, messages=ASKED, stop_sequences=["wo"])
    assert (choice.message.content, choice.stop_reason) == ("one", " two")
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == ("one t", "stop_sequence", "wo")


async def test_a_schema_is_kept_behind_the_reasoning() -> None:
    async with serving(OPENED, "hm</think>\n\n{}") as served:
        await served.openai.chat.completions.create(
            model="m", messages=ASKED, response_format={"type": "json_object"}
        )
        grammar = served.canned.asked[0].sampling.grammar
    assert grammar is not None
    assert grammar.text.startswith("start: ANY_REASONING <[")


class Sum(pydantic.BaseModel):
    """What an answer must be."""

    model_config = pydantic.ConfigDict(extra="forbid")
    total: int
    note: str = ""


STRICT: Any = {"name": "add", "parameters": {"type": "object"}, "strict": True}
CLAUDES: Any = {"name": "add", "input_schema": {"type": "object"}}
MARKED = '{"total": 3, "note": "<tool_call> {"}'


@pytest.mark.parametrize("answers", [True, False])
async def test_an_answer_in_a_format_or_a_call_in_every_api(answers: bool) -> None:
    async with serving(HERMES, MARKED if answers else f"<tool_call>\n{CALL}\n</tool_call>") as served:
        tools = [{"type": "function", "function": STRICT}]
        chat: Any = {"model": "m", "messages": ASKED, "tools": tools, "response_format": Sum}
        parsed = (await served.openai.chat.completions.parse(**chat)).choices[0]
        async with served.openai.chat.completions.stream(**chat) as events:
            streamed = (await events.get_final_completion()).choices[0]
        response = await served.openai.responses.parse(
            model="m", input="q", tools=[{"type": "function", **STRICT}], text_format=Sum
        )
        schema = Sum.model_json_schema()
        message = await served.claude.messages.create(
            model="m", max_tokens=99, messages=ASKED, tools=[CLAUDES],
            extra_body={"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        )  # fmt: skip
        assert all("(answer | calls)" in request.sampling.grammar.text for request in served.canned.asked)
    expected = Sum(total=3, note="<tool_call> {")
    for choice in (parsed, streamed):
        assert choice.finish_reason == ("stop" if answers else "tool_calls")
        assert choice.message.parsed == (expected if answers else None)
        assert [call.function.arguments for call in choice.message.tool_calls or ()] == (
            [] if answers else ['{"a": 1}']
        )
    assert response.output_parsed == (expected if answers else None)
    assert [item.type for item in response.output] == ["message" if answers else "function_call"]
    assert [block.type for block in message.content] == ["text" if answers else "tool_use"]
    assert message.stop_reason == ("end_turn" if answers else "tool_use")


async def test_a_required_call_has_no_answer_beside_it_and_no_call_no_other_text() -> None:
    async with serving(HERMES, f"<tool_call>\n{CALL}\n</tool_call>") as served:
        chat: Any = {"model": "m", "messages": ASKED, "tools": [TOOL], "response_format": {"type": "json_object"}}
        for choice in ("required", {"type": "function", "function": {"name": "add"}}, "none"):
            await served.openai.chat.completions.create(**chat, tool_choice=choice)
        *calls, answer = (request.sampling.grammar for request in served.canned.asked)
    assert all("answer" not in grammar.text and "calls:" in grammar.text for grammar in calls)
    assert answer.text == '{"type": "object"}'


async def test_a_cut_call_is_told_as_such_in_every_api() -> None:
    arguments = '{"a": "xy", "b": 1, "c": [2, 3'
    async with serving(HERMES, f'<tool_call>\n{{"name": "add", "arguments": {arguments}') as served:
        served.canned.ended = FinishReason.LENGTH
        any_tool: Any = {"max_tokens": 9, "tools": [CLAUDES], "tool_choice": {"type": "any"}}
        choice = (await served.openai.chat.completions.create(model="m", messages=ASKED, tools=[TOOL])).choices[0]
        message = await served.claude.messages.create(model="m", messages=ASKED, **any_tool)
        async with served.claude.messages.stream(model="m", messages=ASKED, **any_tool) as events:
            streamed = await events.get_final_message()
        required: Any = {"tools": [{"type": "function", **STRICT, "strict": False}], "tool_choice": "required"}
        response = await served.openai.responses.create(model="m", input="q", **required)
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name, call.function.arguments) == ("length", "add", arguments)
    for each in (message, streamed):
        assert [block.type for block in each.content] == ["tool_use"]
        assert (each.stop_reason, each.content[0].input) == ("max_tokens", {"a": "xy", "b": 1, "c": [2, 3]})
    (item,) = response.output
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (item.type, item.status, item.arguments) == ("function_call", "incomplete", arguments)


@pytest.mark.parametrize(
    "levels", [65, 400, 5000, *(pytest.param(levels, marks=pytest.mark.full) for levels in (250, 900))]
)
async def test_no_depth_of_json_is_a_defect(levels: int) -> None:
    """Written by hand: the clients' own JSON libraries can't nest so deep."""
    text = '{"a":' * levels + "1" + "}" * levels
    use = f'{{"type": "tool_use", "id": "i", "name": "f", "input": {text}}}'
    call = f'{{"id": "i", "type": "function", "function": {{"name": "f", "arguments": "{{}}", "b": {text}}}}}'
    tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {text}}}}}'
    claude = '"model": "m", "max_tokens": 1'
    user = '{"role": "user", "content": "q"}'
    bodies = {
        "/v1/chat/completions": [
            f'{{"messages": [{user}], "tools": [{tool}]}}',
            f'{{"messages": [{user}, {{"role": "assistant", "tool_calls": [{call}]}}]}}',
            f'{{"messages": [{user}], "tool_choice": {text}}}',
        ],
        "/v1/messages": [
            f'{{{claude}, "messages": [{user}], "tools": [{{"name": "f", "input_schema": {text}}}]}}',
            f'{{{claude}, "messages": [{user}, {{"role": "assistant", "content": [{use}]}}, {user}]}}',
            f'{{{claude}, "messages": [{user}], "paceline": {text}}}',
        ],
        "/v1/responses": [
            f'{{"input": "q", "tools": [{{"type": "function", "name": "f", "parameters": {text}}}]}}',
            f'{{"input": "q", "paceline": {text}}}',
        ],
    }
    async with serving(HERMES, "so") as served:
        for path, contents in bodies.items():
            for content in contents:
                answer = await served.http.post(path, content=content, headers=JSON)
                assert answer.status_code == 400, (path, content[:120], answer.text[:200])


async def test_a_defect_is_answered_logged_and_counted_under_the_requests_id(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    counted: list[tuple[str, int]] = []
    monkeypatch.setattr(metrics, "http_request_done", lambda route, status, seconds: counted.append((route, status)))

    async def broken(caller: object) -> Upstream:
        raise KeyError("nobody")

    async with serving(HERMES, "so", defective=True) as served:
        monkeypatch.setattr(served.canned, "choose", broken)
        with caplog.at_level(logging.INFO, "paceline_gateway"):
            answer = await served.http.post("/tokenize", json={"prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    (told,) = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert "status=500" in told and told.endswith(f"id={answer.headers['x-request-id']}")
    assert [type(record.exc_info[1]) for record in caplog.records if record.exc_info] == [KeyError]
    assert counted == [("/tokenize", 500)]
