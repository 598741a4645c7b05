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
"""Bytes of all words together: 64 for each of as many as there may be, which a tokenizer reads in 0.1 s."""
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
    """Build a coordinator's request for one prompt.

    Args:
        body: the client's request.
        token_ids: the prompt.
        sampling: the same for all prompts.
        model: the coordinator's name of the model; empty: its only one.
        max_new_tokens: None: up to the context length.
        prompt_logprobs: alternatives of each of the prompt's tokens; None: no log-probabilities at all.

    Raises:
        InvalidInput, HttpError: naming field, value and limit.
    """
    options = body.paceline or PacelineOptions()
    return GenerateRequest(
        token_ids=tuple(token_ids),
        model=model,
        sampling=sampling,
        # OpenAI's seeds may be negative: each stands for another of ours.
        seed=None if body.seed is None else body.seed % SEEDS,
        max_new_tokens=max_new_tokens,
        stop=_stop_strings(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        prompt_logprobs=prompt_logprobs,
        acceptance=Acceptance(options.acceptance or Acceptance.COUPLED.value),
        speculation=SpeculationSettings(
            off=bool(options.off),
            drafter=options.drafter or "",
            num_draft_tokens=options.num_draft_tokens,
            explain=bool(options.explain),
            report_rounds=bool(options.rounds and body.stream),
        ),
    )


async def read_sampling(services: Services, body: GenerationFields, logprobs: int | None) -> SamplingParams:
    """Read how tokens are drawn; long lists of bad words are tokenised beside the event loop.

    Args:
        services: the process's.
        body: the client's request.
        logprobs: alternatives of each token; None: no log-probabilities at all.

    Raises:
        InvalidInput, HttpError: naming field, value and limit.
    """
    words, size = body.bad_words or (), check_bad_words(body.bad_words or (), services.tokenizer)
    ids = await services.prompts.run(lambda: [bad_word_ids(word, services.tokenizer) for word in words], size)
    return sampling_params(body, [reading for readings in ids for reading in readings], logprobs)


def sampling_params(
    body: GenerationFields, bad_words: Sequence[tuple[int, ...]], logprobs: int | None
) -> SamplingParams:
    """Read how tokens are drawn, with bad words as ids; null fields get the model's defaults, or OpenAI's."""
    settings: dict[str, Any] = {
        "temperature": body.temperature,
        "top_k": None if body.top_k is None else max(0, body.top_k),  # vLLM's -1, too, keeps all
        "top_p": body.top_p,
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
    }
    return SamplingParams(
        **{name: value for name, value in settings.items() if value is not None},
        logprobs=logprobs,
        logit_bias=_logit_bias(body.logit_bias or {}),
        bad_words=tuple(bad_words),
        min_tokens=body.min_tokens or 0,
        grammar=grammar_of(body),
    )


def grammar_of(body: GenerationFields) -> Grammar | None:
    """Return the language that the text must belong to, in whichever field it stands. Raises as `read_sampling`."""
    outputs, response_format = body.structured_outputs, body.response_format
    if response_format is None or response_format.type == "text":
        return None if outputs is None else _structured_grammar(outputs)
    if outputs is not None:
        raise refusal("structured_outputs", "must be left out with response_format, which asks for JSON, too")
    if response_format.type == "json_object":
        return Grammar(GrammarKind.JSON_SCHEMA, ANY_OBJECT)
    if response_format.json_schema is None or response_format.json_schema.schema_ is None:
        raise refusal("response_format.json_schema.schema", "must be given with the type json_schema")
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(response_format.json_schema.schema_))


def _structured_grammar(outputs: StructuredOutputs) -> Grammar:
    fields = outputs.model_fields_set - {name for name, value in outputs if value is None}
    if len(fields) != 1:
        raise refusal("structured_outputs", "must have exactly 1 of json, json_object, regex, choice, grammar")
    if outputs.json_ is not None:
        text = outputs.json_ if isinstance(outputs.json_, str) else json.dumps(outputs.json_)
        return Grammar(GrammarKind.JSON_SCHEMA, text)
    if outputs.regex is not None:
        return Grammar(GrammarKind.REGEX, outputs.regex)
    if outputs.grammar is not None:
        return Grammar(GrammarKind.LARK, outputs.grammar)
    if outputs.choice is not None:
        return Grammar(GrammarKind.LARK, _choice_grammar(outputs.choice))
    return Grammar(GrammarKind.JSON_SCHEMA, ANY_OBJECT)


def _choice_grammar(choices: Sequence[str]) -> str:
    if not choices or "" in choices:
        raise refusal("structured_outputs.choice", "must have at least 1 text, none of them empty")
    return f"start: {' | '.join(json.dumps(choice, ensure_ascii=False) for choice in choices)}"


def check_bad_words(words: Sequence[str], tokenizer: Tokenizer) -> int:
    """Refuse words beyond the limits, and return the bytes of both readings. Raises as `read_sampling`."""
    require(len(words) <= MAX_BAD_WORDS, "bad_words", len(words), f"at most {MAX_BAD_WORDS}")
    sizes, limit = [utf8_bytes(word) for word in words], MAX_BAD_WORD_TOKENS * tokenizer.max_token_bytes
    longest = max(sizes, default=0)
    require(longest <= limit, "bad_words bytes", longest, f"at most {limit}, {MAX_BAD_WORD_TOKENS} tokens, in each")
    total = sum(sizes)
    require(total <= MAX_BAD_WORDS_BYTES, "bad_words bytes", total, f"at most {MAX_BAD_WORDS_BYTES} in all")
    return 2 * total


def bad_word_ids(word: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Return a word's ids at a text's beginning and behind a space, as in vLLM; once where both are the same."""
    if not word.strip():
        raise refusal("bad_words", "must have more than white space in each")
    readings = (tokenizer.encode(text, add_special_tokens=False) for text in (word, f" {word.lstrip()}"))
    return list(dict.fromkeys(readings))


def _logit_bias(biases: dict[str, float]) -> tuple[tuple[int, float], ...]:
    for token_id in biases:
        if not (token_id.isascii() and token_id.isdecimal() and len(token_id) <= len(str(SEEDS))):
            raise refusal("logit_bias", f"keys must be token ids, and one is {token_id[:20]!r}")
    return tuple((int(token_id), bias) for token_id, bias in biases.items())


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)
