"""The worker that SGLang's scheduler makes on each rank: that of n-gram speculation, with other trees and rules.

Read in SGLang 0.5.23: `srt/speculative/ngram_worker.py`, `srt/plugins/hook_registry.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.speculative.ngram_worker import NGRAMWorker

from paceline.drafting.client import DraftClient
from paceline.drafting.server_client import start_client
from paceline_sglang.algorithm import settings
from paceline_sglang.trees import DraftedTrees, TreeRows
from paceline_sglang.verification import verify_by_drawing

RULE = "sglang.srt.speculative.ngram_worker.eagle_sample"
"""What decides about drafted tokens, and is replaced by SGLang's registry of hooks."""


class DraftServiceWorker(NGRAMWorker):  # type: ignore[misc]  # SGLang is where it runs
    """Of the ranks that share a target the first one asks for trees, and all verify its answer.

    The arguments are those of SGLang's workers.
    """

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        self._ranks = get_parallel().tp_group
        client = client_of(target_worker, self.draft_token_num) if self._ranks.rank_in_group == 0 else None
        self.ngram_corpus = DraftedTrees(client, self.draft_token_num)
        HookRegistry.register(RULE, partial(verify_by_drawing, target_worker.model_runner), HookType.AROUND)
        HookRegistry.apply_hooks()

    def _prepare_draft_tokens(self, batch: Any) -> TreeRows:
        self.ngram_corpus.requests = {req.rid: req for req in batch.reqs}
        rows: TreeRows = self._ranks.broadcast_object(super()._prepare_draft_tokens(batch), src=0)
        return rows


def client_of(target_worker: Any, nodes: int) -> DraftClient:
    """A client that has begun to link.

    Raises:
        InvalidInput: the variable holds no settings.
        Unsupported: the `OTEL_*` variables ask for traces or metrics, and the extra `otel` isn't installed.
    """
    model, spec = target_worker.model_config, get_spec()
    return start_client(
        settings(),
        target_worker.tokenizer.get_vocab(),
        model.vocab_size,
        most_tokens=spec.speculative_num_steps,
        most_nodes=nodes - 1 if spec.speculative_eagle_topk > 1 else 0,
        max_length=model.context_len,
    )
