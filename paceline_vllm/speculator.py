"""The speculator that vLLM's V2 model runner gets from `plugin`, read in vLLM 0.32 and 0.33.

It stands where `vllm/v1/worker/gpu/spec_decode/ngram/speculator.py` does and keeps its contract: a row for each
request, always of as many tokens as are configured, since the scheduler has reserved a place for each of them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from paceline.drafting.client import DraftClient
from paceline.drafting.served_request import ServedRequest
from paceline.protocol.errors import require
from paceline_vllm.drafts import Offers, drafts_of


class DraftSpeculator(BaseSpeculator):  # type: ignore[misc]  # vLLM is where it runs
    """Offers what draft services have drafted for a step's outcome while vLLM computed it.

    It reads each step's tokens on the host, so it waits for the device once a step.

    Args:
        vllm_config: vLLM's `VllmConfig`.
        device: of the tokens.
        req_states: vLLM's `RequestState`: the tokens of the requests that are running.

    Raises:
        InvalidInput: the ranks that share a target are not those of tensor parallelism alone.
        pydantic.ValidationError, Unsupported: as `drafts_of`.
    """

    supports_mm_inputs = False
    draft_logits = None
    """A drafted token counts as certain of itself."""

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        contexts = vllm_config.parallel_config.prefill_context_parallel_size
        require(contexts == 1, "prefill_context_parallel_size", contexts, "1, with Paceline's drafts")
        self.drafts = drafts_of(vllm_config)
        self._device = device
        self._states = req_states
        self._most_tokens: int = vllm_config.speculative_config.num_speculative_tokens
        self._requests: dict[str, ServedRequest] = {}

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Nothing is captured."""

    def capture(self) -> None:
        """Nothing is captured."""

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """The token ids to verify next [requests, tokens], int64.

        A place without a draft has the request's last token, as with vLLM's own n-grams: the model runs on every
        place, and an id outside the vocabulary would stop the device.

        Args:
            input_batch: the step's `InputBatch`: the ids of its requests, and where their tokens are.
            attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states: not read.
            num_sampled, num_rejected: not read: the tokens of `req_states` are those behind the step.
            last_sampled: [slots, 1], the last token of each request.
            next_prefill_tokens, temperature, seeds: not read.
            dp_sync_state, skip_attn_for_dummy_run, mm_inputs, is_profile: not read.
            dummy_run: the batch's requests are none.
            num_speculative_tokens: not read: the runner takes so many of each row.
        """
        slots = input_batch.idx_mapping[: input_batch.num_reqs].long()
        rows = last_sampled.view(-1)[slots, None].repeat(1, self._most_tokens)
        if dummy_run:
            return rows
        offers = self.drafts.ask(partial(self._ask, req_ids=input_batch.req_ids, slots=slots))
        if offers is not None and any(offers):
            padded = [[*offer, *[-1] * (self._most_tokens - len(offer))] for offer in offers]
            own = torch.tensor(padded, dtype=torch.int64).to(self._device)
            rows = torch.where(own < 0, rows, own)
        # Ranks that had other rows would compute other tokens: all have those of the rank that asks.
        shared: torch.Tensor = get_tp_group().broadcast(rows, src=0)
        return shared

    def _ask(self, client: DraftClient, req_ids: list[str], slots: torch.Tensor) -> Offers:
        states = self._states
        for req_id in [each for each in self._requests if each not in states.req_id_to_index]:
            client.end(self._requests.pop(req_id))
        lengths, tails = self._latest(slots)
        committed: list[tuple[ServedRequest, list[int]]] = []
        for req_id, slot, length, tail in zip(req_ids, slots.tolist(), lengths, tails, strict=True):
            request = self._requests.get(req_id)
            if request is not None and 0 <= (new := length - request.length) <= len(tail):
                committed.append((request, tail[len(tail) - new :]))
                continue
            if request is not None:  # another request of this id
                client.end(request)
            tokens = states.all_token_ids.gpu[slot, :length].tolist()
            self._requests[req_id] = client.open(tokens, int(states.prompt_len.np[slot]))
            committed.append((self._requests[req_id], []))
        return client.step(committed)

    def _latest(self, slots: torch.Tensor) -> tuple[list[int], list[list[int]]]:
        """The number of tokens in each slot, and the latest of them: as many as a step may commit."""
        lengths = self._states.total_len.gpu[slots].long()[:, None]
        places = lengths + torch.arange(-self._most_tokens - 1, 0, device=slots.device)
        tails = self._states.all_token_ids.gpu[slots[:, None], places.clamp(min=0)]
        lists: list[list[int]] = torch.cat((lengths, tails.long()), 1).tolist()
        return [each[0] for each in lists], [each[1:] for each in lists]
