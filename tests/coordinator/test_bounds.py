"""Every field that a client can send has a bound, or a reason to have none; a new field has to say which."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from coordinator.prepare import ServedModel, prepare
from paceline.models.prompts import PromptReader
from paceline.models.tokenizer import load_tokenizer
from paceline.protocol import codec
from paceline.protocol.codec import generation, parts
from paceline.protocol.errors import InvalidInput, PacelineError, UnknownModel
from paceline.protocol.generation import MAX_INPUT_TOKENS, MAX_MESSAGES, MAX_STOP_TOKENS
from paceline.protocol.sampling import MAX_BAD_WORDS, MAX_GRAMMAR_BYTES
from paceline.v1 import generation_service_pb2 as pb
from paceline.v1 import types_pb2

Request = pb.GenerateRequest
SERVED = ServedModel("m", load_tokenizer("table:vocab=300"), 100, ("auto",))
MANY = 200_000
"""Empty values; a message of 4 MiB holds ten times as many."""
LARGE = "x" * (MAX_GRAMMAR_BYTES + 1)


def too_many(most: int, number: int | None = None) -> str:
    return f"{number or most + 1}: must be at most {most}"


OVER: dict[str, tuple[Any, str]] = {
    "model": ("m" * 513, "model bytes = 513: must be at most 512"),
    "prompt": ("x" * 101, "prompt bytes = 101: must be at most 100"),
    "chat.messages[]": ([pb.ChatMessage()] * MANY, f"chat messages = {too_many(MAX_MESSAGES, MANY)}"),
    "chat.messages.role": ("r" * 100_000, "must be system, user or assistant"),
    "chat.messages.content": ("x" * 101, "chat content bytes = 101: must be at most 100"),
    "tokens.token_ids[]": ([1] * (MAX_INPUT_TOKENS + 1), f"token_ids = {too_many(MAX_INPUT_TOKENS)}"),
    "tokens.token_ids": ([300], "token_ids = 300: must be in [0, 300)"),
    "sampling.temperature": (101, "temperature = 101"),
    "sampling.top_p": (1.5, "top_p = 1.5"),
    "sampling.min_p": (1.5, "min_p = 1.5"),
    "sampling.logprobs": (21, "logprobs = 21"),
    "sampling.repetition_penalty": (101, "repetition_penalty"),
    "sampling.presence_penalty": (3, "presence_penalty = 3"),
    "sampling.frequency_penalty": (-3, "frequency_penalty = -3"),
    "sampling.logit_bias[]": (dict.fromkeys(range(1025), 1.0), "logit_bias entries = 1025: must be at most 1024"),
    "sampling.logit_bias.key": ({300: 1.0}, "logit_bias id = 300"),
    "sampling.logit_bias.value": ({1: 101.0}, "logit_bias of 1 = 101"),
    "sampling.bad_words[]": ([types_pb2.TokenSequence()] * MANY, f"bad_words = {too_many(MAX_BAD_WORDS, MANY)}"),
    "sampling.bad_words.token_ids[]": ([1] * 65, "bad_words tokens = 65: must be at most 64"),
    "sampling.bad_words.token_ids": ([300], "bad_words id = 300"),
    "sampling.min_tokens": (100, "min_tokens = 100: must be at most 99"),
    "sampling.grammar.json_schema": (LARGE, f"json_schema bytes = {len(LARGE)}: must be in [1, {MAX_GRAMMAR_BYTES}]"),
    "sampling.grammar.regex": (LARGE, f"regex bytes = {len(LARGE)}: must be in [1, {MAX_GRAMMAR_BYTES}]"),
    "sampling.grammar.lark": (LARGE, f"lark bytes = {len(LARGE)}: must be in [1, {MAX_GRAMMAR_BYTES}]"),
    "max_new_tokens": (100, "max_new_tokens = 100: must be at most 99"),
    "stop[]": ([""] * MANY, f"stop strings = {MANY}: must be at most 16"),
    "stop": (["x" * 257], "must be 1 to 256 characters"),
    "acceptance": (99, "acceptance = 99"),
    "speculation.drafter": ("x" * 513, "drafter bytes = 513: must be at most 512"),
    "speculation.num_draft_tokens": (65, "num_draft_tokens = 65"),
    "speculation.tree_widths[]": ([1] * 65, "tree_widths = 65: must be at most 64 depths"),
    "speculation.tree_widths": ([65], "tree_widths = 65: must be in [1, 64]"),
    "resume_token_ids[]": ([1] * (MAX_INPUT_TOKENS + 1), f"resume_token_ids = {too_many(MAX_INPUT_TOKENS)}"),
    "resume_token_ids": ([300], "resume_token_ids = 300: must be in [0, 300)"),
    "stop_token_ids[]": ([1] * (MAX_STOP_TOKENS + 1), f"stop_token_ids = {too_many(MAX_STOP_TOKENS)}"),
    "stop_token_ids": ([300], "stop_token_ids = 300: must be in [0, 300)"),
    "prediction[]": ([1] * 101, "prediction tokens = 101: must be at most 100, the context"),
    "prediction": ([300], "prediction = 300: must be in [0, 300)"),
    "prediction_text": ("x" * 101, "prediction bytes = 101: must be at most 100"),
    "sample_index": (1 << 24, "sample_index = 16777216: must be in [0, 2^24)"),
    "prompt_logprobs": (21, "prompt_logprobs = 21: must be in [0, 20]"),
}
"""By field a value beyond its bound, and what its refusal says."""
FREE = {
    "sampling.top_k": "more than there are tokens keeps them all",
    "seed": "every 64-bit number is one",
    "ignore_eos": "yes or no",
    "speculation.off": "yes or no",
    "speculation.explain": "yes or no",
    "speculation.report_rounds": "yes or no",
}


def fields_of(kind: Any, prefix: str = "") -> Iterator[str]:
    """Every scalar, by its path; a repeated field once more, for how many there are."""
    for field in kind.fields:
        path = prefix + field.name
        if field.is_repeated:
            yield f"{path}[]"
        if field.message_type is None:
            yield path
        else:
            yield from fields_of(field.message_type, f"{path}.")


def request_with(path: str) -> Request:
    """A request that exceeds one bound."""
    message = Request(seed=1)
    if path.split(".")[0] not in ("prompt", "chat", "tokens"):
        message.tokens.token_ids.append(1)
    value, _ = OVER[path]
    *parents, name = path.removesuffix("[]").split(".")
    owner: Any = message
    for parent in parents:
        owner = getattr(owner, parent)
        if parent == "messages":
            owner = owner.add(role="user", content="x")
        elif parent == "bad_words":
            owner = owner.add()
    if isinstance(value, dict):
        message.sampling.logit_bias.update(value)
    elif isinstance(value, list):
        getattr(owner, name).extend(value)
    else:
        setattr(owner, name, value)
    return message


def refusal(message: Request) -> PacelineError:
    async def take() -> None:
        reader = PromptReader(SERVED.tokenizer)
        try:
            request = codec.decode_generate_request(Request.FromString(message.SerializeToString()))
            prepare(await reader.tokenise(request, SERVED.max_length), SERVED)
        finally:
            reader.close()

    with pytest.raises(PacelineError) as caught:
        asyncio.run(take())
    return caught.value


def test_every_field_is_bounded_or_says_why_not() -> None:
    assert sorted(fields_of(Request.DESCRIPTOR)) == sorted([*OVER, *FREE])


@pytest.mark.parametrize("path", OVER)
def test_a_value_beyond_its_bound_is_refused_by_name(path: str) -> None:
    error = refusal(request_with(path))
    words = OVER[path][1]
    assert isinstance(error, InvalidInput), error
    assert words in error.message
    assert len(error.message) < 500


@pytest.mark.parametrize("path", ["chat.messages[]", "sampling.bad_words[]", "stop[]", "tokens.token_ids[]"])
def test_too_many_values_are_counted_before_any_is_converted(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    message = request_with(path)
    for module in (generation, parts):
        monkeypatch.setattr(module, "check_known", lambda name, message: None)  # wants a real message
    with pytest.raises(InvalidInput, match="must be at most"):
        codec.decode_generate_request(Counted(message))  # type: ignore[arg-type]  # looks like one


class Counted:
    """A message whose repeated fields can be counted, and fail the test when they are read."""

    def __init__(self, message: Any) -> None:
        self._message = message

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._message, name)
        if hasattr(value, "DESCRIPTOR"):
            return Counted(value)
        return Unread(value) if hasattr(value, "__len__") and not isinstance(value, str) else value


class Unread:
    """Has a length, and values if they are few."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        assert len(self) < 10, "they are counted first"
        return iter(self._values)


def test_another_model_s_name_is_refused() -> None:
    assert isinstance(refusal(Request(model="n", prompt="x")), UnknownModel)
