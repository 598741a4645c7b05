"""An SGLang server that is a fake: its scheduler's loop around the restated worker, and a table as its model."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.services.harness import LAW, SPEC
from tests.sglang import restated
from tests.sglang.restated import Sampler, SamplingBatchInfo, SamplingParams

VOCABULARY = {f"t{each}": each for each in range(SPEC.vocab)}


def arguments(**changes: Any) -> Any:
    own = {
        "device": "cuda",
        "pp_size": 1,
        "attn_dp_size": 1,
        "disaggregation_mode": "null",
        "skip_tokenizer_init": False,
        "page_size": 1,
        "attention_backend": None,
        "speculative_eagle_topk": None,
        "speculative_num_draft_tokens": None,
        "speculative_num_steps": None,
        "speculative_ngram_max_trie_depth": 18,
        "max_running_requests": None,
        "enable_mixed_chunk": True,
        "disable_overlap_schedule": False,
    }
    return SimpleNamespace(**(own | changes))


@dataclass
class Req:
    """SGLang's request; `text` is what the server has really committed."""

    rid: str
    origin_input_ids_unpadded: array[int]
    sampling_params: SamplingParams
    text: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    custom_logit_processor: str | None = None


class Target:
    """The target's worker: logits of each node of each tree."""

    def __init__(self) -> None:
        self.model_runner = SimpleNamespace(sampler=Sampler())
        self.model_config = SimpleNamespace(vocab_size=SPEC.vocab, context_len=SPEC.max_length)
        self.tokenizer = SimpleNamespace(get_vocab=lambda: VOCABULARY)

    def forward_batch_generation(self, batch: Any, *, is_verify: bool) -> Any:
        assert is_verify
        tree = batch.verify_input
        ids = tree.draft_token.reshape(len(batch.reqs), -1).tolist()
        rows = [
            LAW.logits([*req.text, *(ids[row][each] for each in np.flatnonzero(seen) if each)])
            for row, req in enumerate(batch.reqs)
            for seen in tree.mask[row]
        ]
        return SimpleNamespace(next_token_logits=torch.tensor(np.array(rows)))


class Server:
    """Steps all its requests together, with a worker or, without one, a token at a time."""

    def __init__(self, worker: Any = None, *, is_overlapped: bool = True) -> None:
        self.worker, self.is_overlapped = worker, is_overlapped
        self.reqs: list[Req] = []
        self.steps = 0

    def admit(self, rid: str, prompt: Sequence[int], params: SamplingParams | None = None, **more: Any) -> Req:
        req = Req(rid, array("q", prompt), params or SamplingParams(temperature=0), [*prompt], **more)
        self.reqs.append(req)
        (token,) = self._drawn([req])
        self._commit(req, [token])
        return req

    def step(self) -> None:
        self.steps += 1
        if self.worker is None:
            for req, token in zip(self.reqs, self._drawn(self.reqs), strict=True):
                self._commit(req, [token])
            return
        width = restated.SPEC.speculative_num_draft_tokens
        padded = [each for req in self.reqs for each in (*req.accepted, *[-1] * (width - len(req.accepted)))]
        relayed = SimpleNamespace(
            accept_tokens=torch.tensor(padded), accept_lens=torch.tensor([len(req.accepted) for req in self.reqs])
        )
        batch = SimpleNamespace(
            reqs=self.reqs,
            spec_info=relayed,
            seq_lens=[len(req.text) - 1 for req in self.reqs],
            sampling_info=SamplingBatchInfo([req.sampling_params for req in self.reqs]),
            forward_mode=SimpleNamespace(is_idle=lambda: False),
            return_logprob=self.steps % 2 == 0,
            grammar_mask=None,
            grammar_needs_sync=lambda: False,
        )
        answer = self.worker.forward_batch_generation(batch)
        tokens = answer.accept_tokens.reshape(len(self.reqs), width).tolist()
        for req, row, length in zip(self.reqs, tokens, answer.accept_lens.tolist(), strict=True):
            self._commit(req, row[:length])

    def _commit(self, req: Req, tokens: list[int]) -> None:
        """Under overlap SGLang lists a step's tokens when the next one has been launched."""
        req.text += tokens
        req.output_ids += req.accepted if self.is_overlapped else tokens
        req.accepted = tokens

    def _drawn(self, reqs: list[Req]) -> list[int]:
        logits = torch.tensor(np.array([LAW.logits(req.text) for req in reqs]))
        info = SamplingBatchInfo([req.sampling_params for req in reqs])
        positions = torch.tensor([len(req.text) - 1 for req in reqs])
        tokens = Sampler()(SimpleNamespace(next_token_logits=logits), info, False, [], [], positions)
        drawn: list[int] = tokens.tolist()
        return drawn


def plain(prompt: Sequence[int], params: SamplingParams, length: int) -> list[int]:
    server = Server()
    server.admit("", prompt, params)
    while len(server.reqs[0].text) < length:
        server.step()
    return server.reqs[0].text


@contextmanager
def worker_of(args: Any = None) -> Iterator[Any]:
    """The plugin's worker, on a server's first rank."""
    from paceline_sglang.worker import DraftServiceWorker

    worker = DraftServiceWorker(args or arguments(), 0, 0, Target())
    try:
        yield worker
    finally:
        if worker.ngram_corpus.drafts.client is not None:
            worker.ngram_corpus.drafts.client.close()
