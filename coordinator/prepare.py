"""From a tokenised request to a task: check it against the model's limits, draw the seed."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from coordinator.text.sequence import GenerationTask
from paceline.models.generation_defaults import NO_DEFAULTS, GenerationDefaults
from paceline.models.tokenizer import Tokenizer
from paceline.protocol.errors import UnknownModel, Unsupported, require, require_ids
from paceline.protocol.generation import GenerateRequest
from paceline.protocol.proposal import MAX_PROPOSAL_NODES, NONE
from paceline.protocol.sampling import NoiseKey
from paceline.sampling import processors


@dataclass(frozen=True)
class ServedModel:
    """The served model, against which requests are checked."""

    name: str
    tokenizer: Tokenizer
    max_length: int
    drafters: tuple[str, ...]
    """Those of all draft services that were ever linked. A service that is gone costs its requests speed only."""
    seed: int | None = None
    reports_prompts: bool = True
    """Whether any target can send log-probabilities of a prompt."""
    knows_drafters: bool = True
    """Whether every draft service has been linked. Until then an unknown drafter may be one of a missing service."""
    defaults: GenerationDefaults = NO_DEFAULTS
    """The model's own sampling parameters, for requests that leave them open."""


def prepare(
    request: GenerateRequest,
    model: ServedModel,
    *,
    deadline: float | None = None,
    tenant: str = "",
) -> GenerationTask:
    """Check a request and fix everything that its rounds depend on.

    Args:
        request: with token ids (`paceline.models.prompts`).
        model: the served model.
        deadline: on the monotonic clock, seconds.
        tenant: whose request it is.

    Raises:
        InvalidInput: naming field, value and limit.
        UnknownModel: the request names another model.
        Unsupported: no target knows what the request asks for.
    """
    if request.model not in ("", model.name):
        facts = {"field": "model", "value": repr(request.model)}
        raise UnknownModel(f"model = {request.model!r}: must be {model.name!r}, the one served here", metadata=facts)
    prompt = request.token_ids
    max_length = _max_length(request, len(prompt), model.max_length, model.defaults.max_new_tokens)
    vocab_size = model.tokenizer.vocab_size
    require_ids("prompt token_ids", prompt, vocab_size)
    require_ids("resume_token_ids", request.resume_token_ids, vocab_size)
    require_ids("stop_token_ids", request.stop_token_ids, vocab_size)
    require_ids("prediction", request.prediction, vocab_size)
    prediction_tokens = len(request.prediction)
    require(
        prediction_tokens <= model.max_length,
        "prediction tokens",
        prediction_tokens,
        f"at most {model.max_length}, the context",
    )
    _check_sampling(request, model.tokenizer)
    _check_drafter(request, model)
    if request.prompt_logprobs is not None and not model.reports_prompts:
        raise Unsupported(f"prompt_logprobs = {request.prompt_logprobs}: the target's version has no such parameter")
    seed = request.seed if request.seed is not None else model.seed
    return GenerationTask(
        prompt=prompt,
        resume_token_ids=request.resume_token_ids,
        sampling=request.sampling.with_defaults(model.defaults.sampling),
        noise=NoiseKey(secrets.randbits(64) if seed is None else seed, request.sample_index),
        acceptance=request.acceptance,
        max_length=max_length,
        max_rows=min(max_length + MAX_PROPOSAL_NODES, model.max_length),
        stop=request.stop,
        eos_token_ids=frozenset() if request.ignore_eos else model.tokenizer.eos_token_ids,
        stop_token_ids=frozenset(request.stop_token_ids),
        speculation=request.speculation,
        deadline=deadline,
        tenant=tenant,
        prompt_logprobs=request.prompt_logprobs,
        prediction=request.prediction,
    )


def _max_length(request: GenerateRequest, prompt_length: int, context_length: int, default: int | None) -> int:
    """Longest sequence that the request may become, in tokens; `default`: the model's own `max_new_tokens`."""
    limit = context_length - prompt_length
    require(limit >= 1, "prompt length", prompt_length, f"at most {context_length - 1} tokens, to leave room for one")
    new_tokens = request.max_new_tokens if request.max_new_tokens is not None else min(limit, default or limit)
    require(new_tokens <= limit, "max_new_tokens", new_tokens, f"at most {limit}, the context length less the prompt")
    fewest = request.sampling.min_tokens
    require(fewest <= new_tokens, "min_tokens", fewest, f"at most {new_tokens}, the most that may be generated")
    resumed_tokens = len(request.resume_token_ids)
    require(
        resumed_tokens <= new_tokens,
        "resume_token_ids",
        resumed_tokens,
        f"at most max_new_tokens = {new_tokens} of them",
    )
    return prompt_length + new_tokens


def _check_sampling(request: GenerateRequest, tokenizer: Tokenizer) -> None:
    sampling = request.sampling
    processors.check_ids(sampling, (), tokenizer.vocab_size)
    for word in sampling.bad_words:
        # transformers ignores such a word silently.
        ends = len(word) == 1 and word[0] in tokenizer.eos_token_ids
        require(not ends, "bad_words", word, "no end token alone: min_tokens puts the end off")
    if sampling.grammar is not None and not tokenizer.eos_token_ids:
        raise Unsupported(f"{sampling.grammar.kind.value}: the model has no token that ends a text")


def _check_drafter(request: GenerateRequest, model: ServedModel) -> None:
    drafter = request.speculation.drafter
    if drafter and model.knows_drafters and not request.speculation.off:
        require(drafter in model.drafters, "drafter", drafter, f"one of: {', '.join((*model.drafters, NONE))}")
