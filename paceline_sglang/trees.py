"""Drafted trees in the place of SGLang's n-gram corpus, whose interface this is.

Its worker asks once in a step, when what the step before accepted is known, and verifies the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.drafting.client import DraftClient
from paceline.drafting.served_request import ServedRequest
from paceline.drafting.server_client import ServerDrafts
from paceline.protocol.proposal import Proposal
from paceline.sampling.tree import ancestor_mask

TreeRows = tuple[NDArray[np.int64], NDArray[np.bool_]]
"""Token ids [rows · nodes], and the nodes that each node sees [rows · nodes · nodes]. Node 0 is the last token."""


class DraftedTrees:
    """Trees for the requests of each step, by `rid`.

    Attributes:
        requests: SGLang's `Req` of each request in the step that is being prepared.

    Args:
        client: None: nothing is offered.
        nodes: of each tree.
    """

    def __init__(self, client: DraftClient | None, nodes: int) -> None:
        self.drafts = ServerDrafts(client)
        self.requests: Mapping[str, Any] = {}
        self._nodes = nodes
        self._sessions: dict[str, ServedRequest] = {}

    def batch_get(
        self, req_ids: Sequence[str], batch_tokens: Sequence[Sequence[int]], total_lens: Sequence[int]
    ) -> TreeRows:
        """The trees to verify behind each request's last token.

        Args:
            req_ids: of each request.
            batch_tokens: its latest tokens, those that the step before accepted among them.
            total_lens: its number of tokens.
        """
        rows = [*zip(req_ids, batch_tokens, total_lens, strict=True)]
        proposals = self.drafts.ask(partial(self._propose, rows=rows)) or {}
        return pack([tokens[-1] for tokens in batch_tokens], [proposals.get(rid) for rid in req_ids], self._nodes)

    def erase_match_state(self, req_ids: Sequence[str]) -> None:
        """End the sessions of requests that have left the batch."""
        for rid in req_ids:
            request = self._sessions.pop(rid, None)
            if request is not None and self.drafts.client is not None:
                self.drafts.client.end(request)

    def reset(self) -> None:
        """End all sessions."""
        self.erase_match_state([*self._sessions])

    def batch_put(self, batch_tokens: Sequence[Sequence[int]]) -> None:
        """Nothing is learned from texts."""

    def synchronize(self) -> None:
        """Nothing is being learned."""

    def _propose(
        self, client: DraftClient, rows: Sequence[tuple[str, Sequence[int], int]]
    ) -> dict[str, Proposal | None]:
        free_rows = [row for row in rows if not depends_on_steps(self.requests[row[0]])]
        committed = {rid: self._committed(client, rid, tail, length) for rid, tail, length in free_rows}
        answers = client.step([*committed.values()])
        return {
            rid: request.proposal if answer else None
            for (rid, (request, _)), answer in zip(committed.items(), answers, strict=True)
        }

    def _committed(
        self, client: DraftClient, rid: str, tail: Sequence[int], length: int
    ) -> tuple[ServedRequest, Sequence[int]]:
        """A request, and the tokens that the step before committed; none: it is followed from here on."""
        request = self._sessions.get(rid)
        if request is not None:
            if 0 < length - request.length <= len(tail):
                return request, tail[request.length - length :]
            client.end(request)
        prompt, output = (getattr(self.requests[rid], name) for name in ("origin_input_ids_unpadded", "output_ids"))
        missing = length - len(prompt) - len(output)  # accepted, and not yet in SGLang's own list
        text = [*prompt, *output, *tail[len(tail) - missing :]]
        request = self._sessions[rid] = client.open(text, len(prompt))
        return request, []


def depends_on_steps(req: Any) -> bool:
    """Whether a request's next token depends on how many tokens its steps committed.

    SGLang's penalties count one token of each step, whatever it accepted, and its custom processors see the request
    as it was before. So these requests have no drafts, and their texts do not depend on any.
    """
    own = req.sampling_params
    penalties = (own.frequency_penalty, own.presence_penalty, own.repetition_penalty - 1, own.min_new_tokens)
    return any(penalties) or req.custom_logit_processor is not None


def pack(last_tokens: Sequence[int], proposals: Sequence[Proposal | None], nodes: int) -> TreeRows:
    """Proposals behind the last tokens, each filled up with nodes that see themselves alone: no path reaches them."""
    ids = np.zeros((len(last_tokens), nodes), np.int64)
    mask = np.zeros((len(last_tokens), nodes, nodes), np.bool_)
    mask[:, range(nodes), range(nodes)] = True
    ids[:, 0] = last_tokens
    for row, proposal in enumerate(proposals):
        if proposal is not None:
            end = 1 + len(proposal)
            ids[row, 1:end] = proposal.token_ids
            mask[row, 1:end, 0] = True
            mask[row, 1:end, 1:end] = ancestor_mask(proposal.parents)
    return ids.ravel(), mask.ravel()
