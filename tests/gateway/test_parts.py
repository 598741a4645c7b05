"""The gateway's parts by themselves."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

import pytest
from pydantic import ValidationError

from paceline.client import AsyncClient, GenerateRequest, Started, Tokens
from paceline.models.tokenizer import TransformersTokenizer
from paceline.protocol import errors
from paceline.protocol.errors import Overloaded, PacelineError
from paceline.protocol.generation import Finished, FinishReason, ModelDescription, PromptLogprobs, Provenance
from paceline.protocol.handshake import Fingerprint
from paceline.protocol.proposal import Acceptance
from paceline.protocol.records import GenerationStats, RoundStats
from paceline.protocol.sampling import FIELDS_WITH_DEFAULTS, SamplingParams
from paceline.protocol.target import RowLogprobs
from paceline.runtime import telemetry
from paceline_gateway.http.answers import EventStream
from paceline_gateway.http.errors import HttpError, http_error, invalid_body
from paceline_gateway.openai.choices import READ_AHEAD, ChoiceEvent, run_choices
from paceline_gateway.openai.logprobs import MAX_PENDING_TOKENS, PromptEcho
from paceline_gateway.openai.params import sampling_params
from paceline_gateway.openai.types import CompletionRequest
from paceline_gateway.openai.usage import Tally, observe_reply
from paceline_gateway.upstream.caller import caller_of
from paceline_gateway.upstream.coordinators import Coordinator, Upstream
from tests.gateway.description_service import describing
from tests.models.saving import byte_level_tokenizer

TRACE = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "a=b"}


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.InvalidInput, 400), (errors.Unsupported, 400), (errors.Unauthenticated, 401),
        (errors.PermissionDenied, 403), (errors.UnknownModel, 404), (errors.Overloaded, 429), (errors.Cancelled, 499),
        (errors.InternalError, 500), (errors.VocabularyMismatch, 500), (errors.PeerUnavailable, 503),
        (errors.DeadlineExceeded, 504),
    ],
)  # fmt: skip
def test_every_error_has_its_status(kind: type[PacelineError], status: int) -> None:
    error = http_error(kind("what is wrong"))
    assert (error.status, error.message) == (status, "what is wrong")
    assert ("Retry-After" in error.headers) == (status in (429, 503))
    assert http_error(Overloaded("full", retry_after_ms=1200)).headers["Retry-After"] == "2"


@pytest.mark.parametrize(
    ("headers", "key", "sendable"),
    [
        ({}, None, True),
        ({"authorization": "Bearer k"}, "k", True),
        ({"authorization": "bearer  k "}, "k", True),
        ({"authorization": "Basic k"}, None, True),
        ({"x-api-key": "k"}, "k", True),
        ({"authorization": "Bearer a", "x-api-key": "b"}, "a", True),
        ({"authorization": "Bearer a b"}, "a b", False),
        ({"x-api-key": "k" * 1025}, "k" * 1025, False),
    ],
)
def test_keys_of_headers(headers: dict[str, str], key: str | None, sendable: bool) -> None:
    caller = caller_of(headers)
    assert (caller.api_key, caller.key_is_sendable) == (key, sendable)


def test_a_trace_is_passed_on_if_it_is_one() -> None:
    no_trace = {"traceparent": TRACE["traceparent"] + "\r\nx: y"}
    for headers, sent in ((TRACE, tuple(TRACE.items())), (no_trace, ()), ({}, ())):
        with observe_reply(caller_of(headers), [GenerateRequest(token_ids=(1,))], "chat", 1):
            assert telemetry.outgoing() == sent
        assert telemetry.outgoing() == ()


async def test_one_channel_serves_many_callers() -> None:
    async with describing() as (service, coordinator), AsyncClient(coordinator.address, api_key="own") as client:
        service.may_answer.set()
        await client.calling(api_key="theirs", request_id="r-1").describe_models()
        await client.calling().describe_models()
        await client.describe_models()
    said = [(each.get("authorization"), each.get("x-request-id")) for each in service.metadata]
    assert said == [("Bearer theirs", "r-1"), (None, None), ("Bearer own", None)]


def described(**changes: Any) -> Upstream:
    target = Fingerprint("m", "t", 10, "n")
    description = ModelDescription("m", target, Fingerprint("d", "t", 10, "n"), 9, ("auto",), True, True)
    coordinator = object.__new__(Coordinator)
    return Upstream(coordinator, replace(description, **changes))


def test_the_fingerprint_changes_with_what_a_seed_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = described()
    coupled, block = plain.fingerprint(Acceptance.COUPLED), plain.fingerprint(Acceptance.BLOCK)
    others = [Fingerprint("x", "t", 10, "n"), Fingerprint("m", "x", 10, "n"), Fingerprint("m", "t", 10, "x")]
    prints = {described(target=target).fingerprint(Acceptance.COUPLED) for target in others}
    prints.add(described(sampling=SamplingParams(temperature=0.7)).fingerprint(Acceptance.COUPLED))
    prints.add(described(max_new_tokens=7).fingerprint(Acceptance.COUPLED))
    assert len(prints | {coupled, block}) == 7
    other_draft = described(draft=Fingerprint("x", "t", 10, "n"))
    assert other_draft.fingerprint(Acceptance.COUPLED) == coupled, "no draft changes the text"
    assert other_draft.fingerprint(Acceptance.BLOCK) != block
    monkeypatch.setattr("paceline_gateway.upstream.coordinators.NOISE_VERSION", 2)
    assert plain.fingerprint(Acceptance.COUPLED) != coupled


def refusal(body: dict[str, Any]) -> tuple[int, HttpError]:
    """How many errors there are, and what is answered."""
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate(body)
    errors = caught.value.errors()
    return len(errors), invalid_body([each | {"loc": ("body", *each["loc"])} for each in errors])


def test_much_that_is_wrong_is_few_errors() -> None:
    bias, fields = {f"a{i}": "x" for i in range(10_000)}, {f"a{i}": 1 for i in range(10_000)}
    all_wrong: list[dict[str, Any]] = [{"stop": [1] * 10_000}, {"logit_bias": bias}, fields]
    all_wrong += [{"prompt": [1.5] * 10_000}, {"prompt": [["a"]] * 10_000}]
    for wrong in all_wrong:
        count, error = refusal({"prompt": "a"} | wrong)
        assert count < 10, "each takes time and memory"
        assert len(error.message) < 300


DEEP = functools.reduce(lambda value, _: {"a": value}, range(300), cast(Any, 1))


def test_a_parameter_is_named_as_it_was_given_and_no_longer_than_is_read() -> None:
    wrong = {"Top_P": 1, "top-p": 1, "x" * 10_000: 1, "structured_outputs": {"json": DEEP}}
    for (name, value), begins in zip(
        wrong.items(), ("Top_P", "top-p", "xxx", "structured_outputs.json.a"), strict=True
    ):
        _, error = refusal({"prompt": "a", name: value})
        assert (error.param or "").startswith(begins)
        assert len(error.message) < 300


class Endless(AsyncClient):
    """Streams without end, and counts what was taken of it."""

    def __init__(self) -> None:
        self.made = 0
        self.closed = 0

    async def stream(self, request: GenerateRequest | None = None, **fields: Any) -> AsyncGenerator[Any, None]:
        try:
            yield Started(1, (1,), "m")
            while True:
                self.made += 1
                yield Tokens((1,), "a", (Provenance.TARGET,))
                await asyncio.sleep(0)
        finally:
            self.closed += 1


async def test_choices_are_not_read_far_ahead_of_their_reader() -> None:
    client = Endless()
    async with aclosing(run_choices(client, [GenerateRequest(token_ids=(1,))], 3)) as events:
        await anext(events)
        for _ in range(200):
            await asyncio.sleep(0)
        assert client.made <= READ_AHEAD + 3
    assert client.closed == 3, "leaving them ends them all"


class Failing(Endless):
    """Its second sample fails."""

    async def stream(self, request: GenerateRequest | None = None, **fields: Any) -> AsyncGenerator[Any, None]:
        assert request is not None
        if request.sample_index:
            raise Overloaded("no room")
        async for event in super().stream(request):
            yield event


async def test_a_choice_that_fails_ends_all() -> None:
    client = Failing()
    with pytest.raises(Overloaded):
        async for _ in run_choices(client, [GenerateRequest(token_ids=(1,))], 2):
            pass
    assert client.closed == 1


class Reader:
    """A client of a stream; `takes`: whether it reads what it gets."""

    def __init__(self, *, takes: bool) -> None:
        self.sent: list[dict[str, Any]] = []
        self.came = asyncio.Event()
        self.gone = asyncio.Event()
        self._takes = takes

    async def read(self, stream: EventStream) -> None:
        await asyncio.wait_for(stream({"type": "http", "path": "/"}, self._receive, self._send), 5)

    async def _receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        if message["type"] == "http.response.body":
            self.came.set()
            if not self._takes:
                await asyncio.Event().wait()


async def events_of(made: list[int]) -> AsyncGenerator[bytes, None]:
    while True:
        made.append(len(made))
        yield b"data: x\n\n"


async def test_nothing_is_made_for_a_reader_that_does_not_read() -> None:
    made, reader = list[int](), Reader(takes=False)
    reading = asyncio.create_task(reader.read(EventStream(events_of(made), reader_timeout_s=60)))
    await reader.came.wait()
    for _ in range(100):
        await asyncio.sleep(0)
    assert made == [0]
    reader.gone.set()
    await reading


async def test_a_reader_that_takes_nothing_for_long_is_cut_off_without_an_end() -> None:
    reader = Reader(takes=False)
    await reader.read(EventStream(events_of([]), reader_timeout_s=0.05))
    assert [message.get("more_body") for message in reader.sent] == [None, True]


async def test_a_text_that_comes_slowly_is_not_cut_off() -> None:
    """The client takes everything at once: it is the next event that takes longer than a client may."""

    async def events() -> AsyncGenerator[bytes, None]:
        for event in (b"first", b"second"):
            await asyncio.sleep(0.15)
            yield event

    reader = Reader(takes=True)
    await reader.read(EventStream(events(), reader_timeout_s=0.05, terminator=b"last"))
    assert [message.get("body", b"") for message in reader.sent] == [b"", b"first", b"second", b"last", b""]


NUMBERS: dict[str, float] = {
    "temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01,
    "repetition_penalty": 1.3, "presence_penalty": 1.5, "frequency_penalty": 0.5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "stated"),
    [
        ({}, {}),
        (dict.fromkeys(NUMBERS), {}),
        (NUMBERS, NUMBERS),
        ({"temperature": 0, "top_k": -1, "top_p": 1.0}, {"temperature": 0.0, "top_k": 0, "top_p": 1.0}),
        ({"min_p": 0.0, "repetition_penalty": 1.0}, {"min_p": 0.0, "repetition_penalty": 1.0}),
    ],
    ids=["none", "null", "all", "off", "neutral"],
)
def test_a_field_that_is_left_out_or_null_is_left_to_the_model(
    fields: dict[str, Any], stated: dict[str, Any]
) -> None:
    body = CompletionRequest.model_validate({"prompt": "x", "min_tokens": 9, **fields})
    params = sampling_params(body, [(3,)], 2)
    assert params.stated_numbers == {name: stated[name] for name in FIELDS_WITH_DEFAULTS if name in stated}
    assert params == SamplingParams(**stated, min_tokens=9, bad_words=((3,),), logprobs=2)


TOKENIZER = TransformersTokenizer(byte_level_tokenizer())
END = 1


def offsets(ids: tuple[int, ...]) -> list[int]:
    echoed = PromptEcho(ids, TOKENIZER)
    rows = tuple(RowLogprobs((token,), (-1.0,)) for token in ids[1:])
    begins: list[int] = echoed.first()["text_offset"]
    for start in range(0, len(rows), 3):
        begins += echoed.rows(PromptLogprobs(1 + start, rows[start : start + 3]))["text_offset"]
    return begins


def test_tokens_of_one_character_begin_where_it_begins() -> None:
    ids = TOKENIZER.encode("aé😀b", add_special_tokens=False)
    assert len(ids) == 1 + 2 + 4 + 1
    assert offsets(ids) == [0, 1, 1, 2, 2, 2, 2, 3]


def test_special_tokens_have_no_text_however_many_there_are() -> None:
    ids = (END,) * (3 * MAX_PENDING_TOKENS) + TOKENIZER.encode("ab", add_special_tokens=False)
    assert offsets(ids) == [0] * (3 * MAX_PENDING_TOKENS + 1) + [1]


def metrics_of(stats: GenerationStats) -> dict[str, object]:
    tally = Tally(1)
    tally.add(ChoiceEvent(0, Finished(FinishReason.STOP, "", stats)))
    assert tally.metrics is not None
    return tally.metrics


def test_metrics_have_reasoning_and_answer_apart_where_there_was_reasoning() -> None:
    reasoning = RoundStats(3, 9, 40.0, num_spec_steps=2, num_draft_tokens=8, num_accepted_draft_tokens=6)
    metrics: Any = metrics_of(GenerationStats(5, 11, reasoning=reasoning, answer=RoundStats(2, 2, 10.0)))
    assert metrics["reasoning"] == {
        "mean_acceptance_length": pytest.approx(4.0), "draft_acceptance_rate": pytest.approx(0.75),
        "num_spec_steps": 2, "num_accepted_draft_tokens": 6, "num_draft_tokens": 8,
        "rounds": 3, "tokens": 9, "tokens_per_second": 40.0,
    }  # fmt: skip
    assert metrics["answer"]["tokens"] == 2
    assert [*metrics_of(GenerationStats(5, 11))] == ["speculative_decoding"]
