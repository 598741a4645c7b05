"""The draft client of a vLLM server, which both of its model runners ask behind each of their steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from paceline.drafting.client import DraftClient, DraftClientSettings
from paceline.drafting.server_client import start_client
from paceline_vllm.section import section_of

logger = logging.getLogger(__name__)

Offers = list[list[int]]
"""Token ids to verify behind each row of a batch; empty where nothing is offered."""


class ServerDrafts:
    """Drafts for a server, of whose ranks that share a target the first one asks and the others offer nothing.

    A defect here ends the drafts, not the server.

    Args:
        vllm_config: vLLM's `VllmConfig`.

    Raises:
        pydantic.ValidationError: naming the setting below `paceline` that is wrong.
        Unsupported: the `OTEL_*` variables ask for traces or metrics, and the extra `otel` isn't installed.
    """

    def __init__(self, vllm_config: Any) -> None:
        parallel = vllm_config.parallel_config
        asks = parallel.rank % parallel.tensor_parallel_size == 0
        self.client = _client_of(vllm_config) if asks else None

    def offers(self, rows: int, ask: Callable[[DraftClient], Offers]) -> Offers:
        """What `ask` gets from the client for a batch of so many rows."""
        if self.client is not None:
            try:
                return ask(self.client)
            except Exception:
                logger.exception("drafting failed, the server goes on without drafts")
                client, self.client = self.client, None
                client.close()
        return [[] for _ in range(rows)]


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
