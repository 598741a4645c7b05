"""The drafts of a vLLM server, for which both of its model runners ask behind each of their steps."""

from __future__ import annotations

from typing import Any

from paceline.drafting.client import DraftClient, DraftClientSettings
from paceline.drafting.server_client import ServerDrafts, start_client
from paceline_vllm.section import section_of

Offers = list[list[int]]
"""Token ids to verify behind each row of a batch; empty where nothing is offered."""


def drafts_of(vllm_config: Any) -> ServerDrafts:
    """The drafts of a rank: of those that share a target the first one asks, and the others offer nothing.

    Raises:
        pydantic.ValidationError: naming the setting below `paceline` that is wrong.
        Unsupported: the `OTEL_*` variables ask for traces or metrics, and the extra `otel` isn't installed.
    """
    parallel = vllm_config.parallel_config
    asks = parallel.rank % parallel.tensor_parallel_size == 0
    return ServerDrafts(_client_of(vllm_config) if asks else None)


def _client_of(vllm_config: Any) -> DraftClient:
    """A client that has begun to link."""
    from vllm.tokenizers import cached_tokenizer_from_config

    model = vllm_config.model_config
    return start_client(
        DraftClientSettings.model_validate(section_of(vllm_config)),
        cached_tokenizer_from_config(model).get_vocab(),
        model.get_vocab_size(),
        most_tokens=vllm_config.speculative_config.num_speculative_tokens,
        max_length=model.max_model_len,
    )
