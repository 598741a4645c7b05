"""The chat path in one process, in formats of models that tests can't run: a coordinator's reply is written here.

What travels is what a coordinator sends: ids, and text without special tokens.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any, cast

import anthropic
import httpx2
import openai
import pydantic
import pytest

from coordinator.text.detokenizer import Detokenizer
from paceline.models.prompts import PromptReader
from paceline.models.tokenizer import TransformersTokenizer
from paceline.protocol.generation import (
    Finished,
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    ModelDescription,
    Provenance,
    Started,
    Tokens,
)
from paceline.protocol.handshake import Fingerprint
from paceline.protocol.records import GenerationStats
from paceline.rpc.retries import RetryBudget
from paceline.runtime import metrics
from paceline.runtime.gateway_config import GatewayConfig
from paceline_gateway.app import create_app
from paceline_gateway.http.guard import RunningRequests
from paceline_gateway.reply.template_probes import read_reply_format
from paceline_gateway.upstream.coordinators import Coordinators, Upstream
from paceline_gateway.upstream.services import Services
from tests.gateway.templates import HERMES, MISTRAL, OPENED, THINKING, templated

ASKED: Any = [{"role": "user", "content": "q"}]
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
JSON = {"content-type": "application/json"}
CALL = '{"name": "add", "arguments": {"a": 1}}'
SWITCHED = "{{ reasoning_effort }} {{ enable_thinking | default(true) }}|"
LETTERS = THINKING.replace("think>", "reasoning>")
"""Its markers are no tokens of their own."""


class CannedCoordinator:
    """Answers every request with one text, a token at a time, as a coordinator's detokenizer does."""

    def __init__(self, tokenizer: TransformersTokenizer, text: str) -> None:
        self._tokenizer = tokenizer
        self._text = text
        self.asked: list[GenerateRequest] = []
        self.ended = FinishReason.STOP
        self.budget = RetryBudget()

    async def choose(self, caller: object) -> Upstream:
        fingerprint = Fingerprint(model="m", tokenizer="t", vocab_size=9)
        description = ModelDescription("m", fingerprint, fingerprint, 10_000, (), True, True)
        return Upstream(cast(Any, self), description)

    async def tenant(self, caller: object) -> str:
        return ""

    def note_answer(self) -> None:
        pass

    @contextmanager
    def client(self, caller: object) -> Iterator[CannedCoordinator]:
        yield self

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        self.asked.append(request)
        yield Started(7, request.token_ids, "m")
        detokenizer = Detokenizer(self._tokenizer, request.token_ids, request.stop)
        for token in self._tokenizer.inner.encode(self._text, add_special_tokens=False):
            text = detokenizer.push(token)
            yield Tokens((token,), text, (Provenance.TARGET,), text_ends=(len(text),))
            if detokenizer.stopped:
                break
        reason = FinishReason.STOP if detokenizer.stopped else self.ended
        yield Finished(reason, detokenizer.flush(), GenerationStats())

    def text_of(self, token_ids: Sequence[int]) -> str:
        """A prompt as the template wrote it."""
        return str(self._tokenizer.inner.decode(list(token_ids), skip_special_tokens=False))

    async def close(self) -> None:
        """Nothing is open."""


@asynccontextmanager
async def serving(template: str, text: str, *, defective: bool = False) -> AsyncIterator[SimpleNamespace]:
    """Official clients of a gateway before such a coordinator.

    defective: the application will raise, which is left to the server, after its answer; otherwise that fails a test.
    """
    tokenizer = templated(template)
    canned = CannedCoordinator(tokenizer, text)
    prompts = PromptReader(tokenizer)
    form = read_reply_format(tokenizer)
    services = Services(GatewayConfig(), tokenizer, prompts, cast(Coordinators, canned), form)
    transport = httpx2.ASGITransport(create_app(services, RunningRequests()), raise_app_exceptions=not defective)
    async with httpx2.AsyncClient(transport=transport) as http:
        yield SimpleNamespace(
            canned=canned,
            http=http,
            openai=openai.AsyncOpenAI(api_key="k", base_url="http://localhost/v1", http_client=http),
            claude=anthropic.AsyncAnthropic(api_key="k", base_url="http://localhost", http_client=http),
        )
    prompts.close()


async def test_reasoning_that_the_template_opened_is_no_content() -> None:
    async with serving(OPENED, "hm\n</think>\n\nYes.") as served:
        choice = (await served.openai.chat.completions.create(model="m", messages=ASKED)).choices[0]
        message = await served.claude.messages.create(model="m", max_tokens=9, messages=ASKED)
        response = await served.openai.responses.create(model="m", input="q")
    assert (choice.message.reasoning_content, choice.message.content) == ("hm", "Yes.")
    assert choice.stop_reason is None
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert [item.type for item in response.output] == ["reasoning", "message"]


def _tokens(tokenizer: TransformersTokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(
    ("template", "reply", "reasoned"),
    [
        (OPENED, "hm é\n</think>\n\nYes.", "hm é\n"),
        (THINKING, "\n<think>hm</think>Yes <think>no</think>", "hm"),
        (THINKING, "Yes.<think>hm</think>", ""),
        (THINKING, "<think>cut off", "cut off"),
        (HERMES, "<think>hm</think>Yes.", ""),
        (LETTERS, " <reasoning>hm 12</reasoning>\nYes.", "hm 12"),
        (LETTERS, "<reasonable>hm</reasoning>", ""),
    ],
)
@pytest.mark.parametrize("stop", [None, "</think>\n\nNo", "zz"])
async def test_reasoning_is_counted_by_its_tokens_whatever_text_waits(
    template: str, reply: str, reasoned: str, stop: str | None
) -> None:
    async with serving(template, reply) as served:
        made = await served.openai.chat.completions.create(model="m", messages=ASKED, stop=stop)
        response = await served.openai.responses.create(model="m", input="q")
    expected = _tokens(templated(template), reasoned)
    assert made.usage.completion_tokens == _tokens(templated(template), reply)
    assert made.usage.completion_tokens_details.reasoning_tokens == expected
    assert response.usage.output_tokens_details.reasoning_tokens == expected


async def test_effort_and_switches_are_the_templates() -> None:
    asked = {"messages": ASKED, "reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}
    async with serving(f"{SWITCHED}{HERMES}", "Yes.") as served:
        assert (await served.http.post("http://localhost/v1/chat/completions", json=asked)).status_code == 200
        told = {name: asked[name] for name in asked}
        counted = (await served.http.post("http://localhost/tokenize", json=told)).json()["tokens"]
        await served.openai.responses.create(model="m", input="q", reasoning={"effort": "low"})
        twice = asked | {"chat_template_kwargs": {"reasoning_effort": "low"}}
        refused = (await served.http.post("http://localhost/v1/chat/completions", json=twice)).json()["error"]
    written = [templated(HERMES).decode(request.token_ids) for request in served.canned.asked]
    assert [text.partition("|")[0] for text in written] == ["high False", "low True"]
    assert list(served.canned.asked[0].token_ids) == counted
    assert refused["param"] == "chat_template_kwargs.reasoning_effort"
    async with serving(f"{SWITCHED}{OPENED}", "Yes.") as served:
        off = {"messages": ASKED, "thinking": {"type": "disabled"}}
        counted = await served.claude.messages.count_tokens(model="m", **off)
        await served.claude.messages.create(model="m", max_tokens=9, **off)
    (request,) = served.canned.asked
    assert templated(HERMES).decode(request.token_ids).startswith(" False|")
    assert counted.input_tokens == len(request.token_ids)
    async with serving(OPENED, "Yes.") as served:
        none = await served.http.post(
            "http://localhost/v1/chat/completions", json={"messages": ASKED, "reasoning_effort": "none"}
        )
    assert none.headers["x-paceline-ignored"] == "reasoning_effort", "it reasons, whatever is asked"


async def test_a_marker_that_the_text_leaves_out_is_seen() -> None:
    async with serving(MISTRAL, f"Let me see.[TOOL_CALLS] [{CALL}]") as served:
        choice = (await served.openai.chat.completions.create(model="m", messages=ASKED, tools=[TOOL])).choices[0]
        plain = (await served.openai.chat.completions.create(model="m", messages=ASKED)).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
    assert choice.message.tool_calls[0].function.arguments == '{"a": 1}'
    assert plain.message.content == f"Let me see. [{CALL}]"


async def test_a_call_in_free_text_streams_in_every_api() -> None:
    async with serving(HERMES, f"So:\n<tool_call>\n{CALL}\n</tool_call>") as served:
        stream = await served.openai.chat.completions.create(model="m", messages=ASKED, tools=[TOOL], stream=True)
        choices = [chunk.choices[0] async for chunk in stream if chunk.choices]
        tool: Any = {"name": "add", "input_schema": {"type": "object"}}
        async with served.claude.messages.stream(model="m", max_tokens=99, messages=ASKED, tools=[tool]) as events:
            message = await events.get_final_message()
        flat: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
        async with served.openai.responses.stream(model="m", input="q", tools=[flat]) as events:
            response = await events.get_final_response()
    assert "".join(choice.delta.content or "" for choice in choices) == "So:"
    pieces = [piece.function.arguments for choice in choices for piece in choice.delta.tool_calls or ()]
    assert ("".join(pieces), choices[-1].finish_reason) == ('{"a": 1}', "tool_calls")
    assert (message.content[0].text, message.content[1].input, message.stop_reason) == ("So:", {"a": 1}, "tool_use")
    assert [item.type for item in response.output] == ["message", "function_call"]
    assert response.output[1].arguments == '{"a": 1}'
    assert served.canned.asked[0].sampling.grammar is None


async def test_the_stop_string_that_ended_it_is_told() -> None:
    async with serving(HERMES, "one two three") as served:
        given: Any = {"model": "m", "messages": ASKED, "stop": ["thr", " two"]}
        choice = (await served.openai.chat.completions.create(**given)).choices[0]
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


async def test_a_required_call_has_no_answer_beside_it_and_no_call_no_other_text() -> None:
    async with serving(HERMES, f"<tool_call>\n{CALL}\n</tool_call>") as served:
        chat: Any = {"model": "m", "messages": ASKED, "tools": [TOOL], "response_format": {"type": "json_object"}}
        for choice in ("required", {"type": "function", "function": {"name": "add"}}, "none"):
            await served.openai.chat.completions.create(**chat, tool_choice=choice)
        *calls, answer = (request.sampling.grammar for request in served.canned.asked)
    assert all("answer" not in grammar.text and "calls:" in grammar.text for grammar in calls)
    assert answer.text == '{"type": "object"}'


@pytest.mark.parametrize("levels", [65, 250, 400, 900, 5000])
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
                answer = await served.http.post(f"http://localhost{path}", content=content, headers=JSON)
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
            answer = await served.http.post("http://localhost/tokenize", json={"prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    (told,) = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert "status=500" in told and told.endswith(f"id={answer.headers['x-request-id']}")
    assert [type(record.exc_info[1]) for record in caplog.records if record.exc_info] == [KeyError]
    assert counted == [("/tokenize", 500)]
