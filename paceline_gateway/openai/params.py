"""A request's fields as the coordinator's: sampling, speculation, ends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from paceline.models.prompts import utf8_bytes
from paceline.models.tokenizer import Tokenizer
from paceline.protocol.errors import require
from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, Grammar, GrammarKind, SamplingParams
from paceline_gateway.http.errors import refusal
from paceline_gateway.openai.types import GenerationFields, PacelineOptions, StructuredOutputs
from paceline_gateway.upstream.services import Services

SEEDS = 1 << 64
MAX_BAD_WORDS_BYTES = 64 << 10
"""Of all words together: 64 for each of as many as there may be, which a tokenizer reads in 0.1 s."""
ANY_OBJECT = '{"type": "object"}'


def generate_request(
    body: GenerationFields,
    token_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    model: str,
    max_new_tokens: int | None,
    prompt_logprobs: int | None = None,
) -> GenerateRequest:
    """What a coordinator is asked for one prompt.

    Args:
        body: as it came.
        token_ids: the prompt.
        sampling: of all prompts.
        model: as the coordinator knows it; empty: the only one.
        max_new_tokens: None: up to the context length.
        prompt_logprobs: alternatives of each of the prompt's tokens; None: none, and no log-probabilities.

    Raises:
        InvalidInput, HttpError: naming field, value and limit.
    """
    asked = body.paceline or PacelineOptions()
    return GenerateRequest(
        token_ids=tuple(token_ids),
        model=model,
        sampling=sampling,
        # OpenAI's seeds may be negative: each stands for another of ours.
        seed=None if body.seed is None else body.seed % SEEDS,
        max_new_tokens=max_new_tokens,
        stop=_listed(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        prompt_logprobs=prompt_logprobs,
        acceptance=Acceptance(asked.acceptance or Acceptance.COUPLED.value),
        speculation=SpeculationSettings(
            off=bool(asked.off),
            drafter=asked.drafter or "",
            num_draft_tokens=asked.num_draft_tokens,
            explain=bool(asked.explain),
            report_rounds=bool(asked.rounds and body.stream),
        ),
    )


async def read_sampling(services: Services, body: GenerationFields, logprobs: int | None) -> SamplingParams:
    """How tokens are drawn, words read beside the event loop where they are long.

    Args:
        services: of this process.
        body: as it came.
        logprobs: alternatives of each token; None: none, and no log-probabilities.

    Raises:
        InvalidInput, HttpError: naming field, value and limit.
    """
    words, size = body.bad_words or (), check_bad_words(body.bad_words or (), services.tokenizer)
    ids = await services.prompts.run(lambda: [bad_word_ids(word, services.tokenizer) for word in words], size)
    return sampling_params(body, [each for of_word in ids for each in of_word], logprobs)


def sampling_params(
    body: GenerationFields, bad_words: Sequence[tuple[int, ...]], logprobs: int | None
) -> SamplingParams:
    """The same, of words that were read; what isn't given is left to the model's defaults, or OpenAI's."""
    given: dict[str, Any] = {
        "temperature": body.temperature,
        "top_k": None if body.top_k is None else max(0, body.top_k),  # vLLM's -1, too, keeps all
        "top_p": body.top_p,
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
    }
    return SamplingParams(
        **{name: value for name, value in given.items() if value is not None},
        logprobs=logprobs,
        logit_bias=_logit_bias(body.logit_bias or {}),
        bad_words=tuple(bad_words),
        min_tokens=body.min_tokens or 0,
        grammar=grammar_of(body),
    )


def grammar_of(body: GenerationFields) -> Grammar | None:
    """The language that the text must belong to, asked for in either way. Raises as above."""
    outputs, wanted = body.structured_outputs, body.response_format
    if wanted is None or wanted.type == "text":
        return None if outputs is None else _structured(outputs)
    if outputs is not None:
        raise refusal("structured_outputs", "must be left out with response_format, which asks for JSON, too")
    if wanted.type == "json_object":
        return Grammar(GrammarKind.JSON_SCHEMA, ANY_OBJECT)
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise refusal("response_format.json_schema.schema", "must be given with the type json_schema")
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(wanted.json_schema.schema_))


def _structured(outputs: StructuredOutputs) -> Grammar:
    given = outputs.model_fields_set - {name for name, value in outputs if value is None}
    if len(given) != 1:
        raise refusal("structured_outputs", "must have exactly 1 of json, json_object, regex, choice, grammar")
    if outputs.json_ is not None:
        text = outputs.json_ if isinstance(outputs.json_, str) else json.dumps(outputs.json_)
        return Grammar(GrammarKind.JSON_SCHEMA, text)
    if outputs.regex is not None:
        return Grammar(GrammarKind.REGEX, outputs.regex)
    if outputs.grammar is not None:
        return Grammar(GrammarKind.LARK, outputs.grammar)
    if outputs.choice is not None:
        return Grammar(GrammarKind.LARK, _one_of(outputs.choice))
    return Grammar(GrammarKind.JSON_SCHEMA, ANY_OBJECT)


def _one_of(choices: Sequence[str]) -> str:
    if not choices or "" in choices:
        raise refusal("structured_outputs.choice", "must have at least 1 text, none of them empty")
    return f"start: {' | '.join(json.dumps(choice, ensure_ascii=False) for choice in choices)}"


def check_bad_words(words: Sequence[str], tokenizer: Tokenizer) -> int:
    """Bytes of both readings of all; refuse what no tokenizer needs to read. Raises as `read_sampling`."""
    require(len(words) <= MAX_BAD_WORDS, "bad_words", len(words), f"at most {MAX_BAD_WORDS}")
    sizes, longest = [utf8_bytes(word) for word in words], MAX_BAD_WORD_TOKENS * tokenizer.max_token_bytes
    most = max(sizes, default=0)
    require(most <= longest, "bad_words bytes", most, f"at most {longest}, {MAX_BAD_WORD_TOKENS} tokens, in each")
    total = sum(sizes)
    require(total <= MAX_BAD_WORDS_BYTES, "bad_words bytes", total, f"at most {MAX_BAD_WORDS_BYTES} in all")
    return 2 * total


def bad_word_ids(word: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """A word's ids at a text's beginning and behind a space, as vLLM forbids words; once where both are the same."""
    if not word.strip():
        raise refusal("bad_words", "must have more than white space in each")
    readings = (tokenizer.encode(text, add_special_tokens=False) for text in (word, f" {word.lstrip()}"))
    return list(dict.fromkeys(readings))


def _logit_bias(given: dict[str, float]) -> tuple[tuple[int, float], ...]:
    for token_id in given:
        if not (token_id.isascii() and token_id.isdecimal() and len(token_id) <= len(str(SEEDS))):
            raise refusal("logit_bias", f"keys must be token ids, and one is {token_id[:20]!r}")
    return tuple((int(token_id), bias) for token_id, bias in given.items())


def _listed(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)
