"""A request's facts as attributes of OpenTelemetry's conventions for generative AI (in development, November 2026).

They are names and numbers only: no prompt, no text, no stop string.
"""

from __future__ import annotations

from paceline.protocol.generation import Finished, GenerateRequest
from paceline.runtime.spans import Attributes, AttributeValue

PROVIDER = "paceline"
CHAT, TEXT_COMPLETION = "chat", "text_completion"
TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"


def operation_of(request: GenerateRequest) -> str:
    """The name that the conventions have for the request's operation."""
    return CHAT if request.messages else TEXT_COMPLETION


def span_name(operation: str, model: str) -> str:
    """The name of the request's span."""
    return f"{operation} {model}".rstrip()


def request_attributes(request: GenerateRequest, model: str, operation: str = "") -> dict[str, AttributeValue]:
    """The attributes of a request's span at its begin; `operation`: empty: that of `operation_of`.

    Every stream of tokens is a streaming request.
    """
    sampling = request.sampling
    attributes: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": operation or operation_of(request),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model or None,
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": request.max_new_tokens,
        "gen_ai.request.seed": request.seed,
        "gen_ai.request.temperature": float(sampling.temperature),
        "gen_ai.request.top_p": float(sampling.top_p),
        "gen_ai.request.top_k": sampling.top_k or None,
        "gen_ai.request.presence_penalty": float(sampling.presence_penalty) or None,
        "gen_ai.request.frequency_penalty": float(sampling.frequency_penalty) or None,
        "paceline.acceptance_rule": request.acceptance.value,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def response_attributes(event: Finished, model: str, prompt_tokens: int) -> Attributes:
    """The attributes that a request's span gets at its end."""
    stats = event.stats
    return {
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": (event.reason.value,),
        TIME_TO_FIRST_CHUNK: stats.time_to_first_token_ms / 1e3,
        INPUT_TOKENS: prompt_tokens,
        "gen_ai.usage.output_tokens": stats.committed,
        "paceline.rounds": stats.rounds,
        "paceline.proposed": stats.num_draft_tokens,
        "paceline.accepted": stats.num_accepted_draft_tokens,
        "paceline.cache_hits": stats.cache_hits,
        "paceline.cache_misses": stats.cache_misses,
    }
