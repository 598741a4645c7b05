"""The proposer that vLLM's V1 model runner loads by `speculative_config`, read in vLLM 0.32 and 0.33.

`GPUModelRunner` makes it from the vLLM config, calls `load_model` once, and `propose` behind every step's sampling,
in the step's critical path. Its answer is what the next step verifies.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from numpy.typing import NDArray

from paceline.drafting.client import DraftClient
from paceline.drafting.served_request import ServedRequest
from paceline_vllm.drafts import Offers, drafts_of
from paceline_vllm.rows import RowTracker


class DraftProposer:
    """Offers what draft services have drafted for a step's outcome while vLLM computed it.

    Args:
        vllm_config: vLLM's `VllmConfig`.

    Raises as `drafts_of`.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.drafts = drafts_of(vllm_config)
        self._rows = RowTracker[ServedRequest]()

    def load_model(self, model: Any) -> None:
        """Nothing is loaded; vLLM's CPU runner calls this unasked."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[Any],
        token_ids_cpu: NDArray[Any],
        slot_mappings: object = None,
    ) -> Offers:
        """The token ids to verify behind each row; empty where nothing is offered.

        Args:
            sampled_token_ids: what the step committed in each row; empty where it computed a part of a prompt.
            num_tokens_no_spec: tokens of each row, those of the step included.
            token_ids_cpu: [rows, tokens], the ids themselves.
            slot_mappings: not read.
        """
        rows = len(sampled_token_ids)
        lengths = num_tokens_no_spec[:rows].tolist()
        ask = partial(self._ask, new_ids=sampled_token_ids, lengths=lengths, token_ids=token_ids_cpu)
        return self.drafts.ask(ask) or [[] for _ in range(rows)]

    def _ask(
        self, client: DraftClient, new_ids: Sequence[Sequence[int]], lengths: Sequence[int], token_ids: NDArray[Any]
    ) -> Offers:
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
