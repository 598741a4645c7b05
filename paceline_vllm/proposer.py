"""The proposer that vLLM's V1 model runner loads by `speculative_config`, read in vLLM 0.32 and 0.33.

`GPUModelRunner` makes it from the vLLM config, calls `load_model` once, and `propose` behind every step's sampling,
in the step's critical path. Its answer is what the next step verifies.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from paceline.drafting.client import DraftClient, DraftClientSettings
from paceline.drafting.goodput_judge import GoodputJudge
from paceline.drafting.served_request import ServedRequest
from paceline.models.tokenizer import vocabulary_fingerprint
from paceline.protocol.handshake import Fingerprint
from paceline.runtime import metrics, telemetry
from paceline.runtime.config import ServerSettings
from paceline_vllm.rows import RowTracker

logger = logging.getLogger(__name__)

SECTION = "paceline"
"""Key of `--additional-config` below which the `DraftClientSettings` are."""


ROUNDS_OF = "paceline-coordinator"
"""Whose spans and metrics a server's rounds have; `OTEL_SERVICE_NAME` gives another name."""


class DraftProposer:
    """Offers what draft services have drafted for a step's outcome while vLLM computed it.

    Of the ranks that share a target one asks and the others offer nothing: vLLM reads the first one's answer.
    A defect here ends the drafts, not the server.

    Args:
        vllm_config: vLLM's `VllmConfig`.
    """

    def __init__(self, vllm_config: Any) -> None:
        parallel = vllm_config.parallel_config
        asks = parallel.rank % parallel.tensor_parallel_size == 0
        self.client = _client_of(vllm_config) if asks else None
        self._rows = RowTracker[ServedRequest]()

    def load_model(self, model: Any) -> None:
        """Nothing is loaded; vLLM's CPU runner calls this unasked."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[Any],
        token_ids_cpu: NDArray[Any],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """The token ids to verify behind each row; empty where nothing is offered.

        Args:
            sampled_token_ids: what the step committed in each row; empty where it computed a part of a prompt.
            num_tokens_no_spec: tokens of each row, those of the step included.
            token_ids_cpu: [rows, tokens], the ids themselves.
            slot_mappings: not read.
        """
        rows = len(sampled_token_ids)
        if self.client is None:
            return [[] for _ in range(rows)]
        try:
            return self._propose(self.client, sampled_token_ids, num_tokens_no_spec[:rows].tolist(), token_ids_cpu)
        except Exception:
            logger.exception("drafting failed, the server goes on without drafts")
            client, self.client = self.client, None
            client.close()
            return [[] for _ in range(rows)]

    def _propose(
        self, client: DraftClient, new_ids: Sequence[Sequence[int]], lengths: Sequence[int], token_ids: NDArray[Any]
    ) -> list[list[int]]:
        texts = [token_ids[row, :length] for row, length in enumerate(lengths)]
        committed: list[tuple[ServedRequest, list[int]]] = []
        for row, text, new in zip(self._rows.find(texts), texts, new_ids, strict=True):
            if row is None:
                committed.append((client.open(text.tolist(), len(text) - len(new)), []))
            else:
                committed.append((row.request, text[len(row.tokens) :].tolist()))
        for request in self._rows.place([(each, text) for (each, _), text in zip(committed, texts, strict=True)]):
            client.end(request)
        return client.step(committed)


def _client_of(vllm_config: Any) -> DraftClient:
    """A client that has begun to link.

    Raises:
        pydantic.ValidationError: naming the setting below `paceline` that is wrong.
        Unsupported: the `OTEL_*` variables ask for traces or metrics, and the extra `otel` isn't installed.
    """
    from vllm.tokenizers import cached_tokenizer_from_config

    model = vllm_config.model_config
    vocabulary = cached_tokenizer_from_config(model).get_vocab()
    size = min(max(vocabulary.values()) + 1, model.get_vocab_size())
    telemetry.configure(ROUNDS_OF)
    metrics.configure(ROUNDS_OF, ServerSettings())
    client = DraftClient(
        DraftClientSettings.model_validate((vllm_config.additional_config or {}).get(SECTION, {})),
        Fingerprint(tokenizer=vocabulary_fingerprint(vocabulary), vocab_size=size),
        most_tokens=vllm_config.speculative_config.num_speculative_tokens,
        max_length=model.max_model_len,
        judge=GoodputJudge(),
    )
    client.start()
    for end in (metrics.shutdown, telemetry.shutdown, client.close):  # the last one first
        atexit.register(end)
    return client
