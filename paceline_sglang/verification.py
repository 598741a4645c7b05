"""Verification by drawing: at each node of a tree the server draws its own token, and goes where it drew.

SGLang decides about a drafted token by chance, so a seed's text depends on drafts, and `min_p` counts for nothing.
Here the server's own sampler draws every node's token as it would without a draft, by the same logits, filters, seed
and position. A drafted token is accepted if it is the drawn one. So drafts change no text, nor a distribution.

Read in SGLang 0.5.23: `eagle_sample` in `srt/speculative/eagle_utils.py`, `srt/layers/sampler.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_func
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.runtime_context import get_parallel

OF_REQUESTS = (
    "temperatures",
    "top_ps",
    "top_ks",
    "min_ps",
    "sampling_seed",
    "acc_additive_penalties",
    "acc_scaling_penalties",
    "logit_bias",
)
"""Tensors of `SamplingBatchInfo` that have a row for each request."""
GREEDY_TOP_K = 1
"""What SGLang makes of temperature 0."""
Verdicts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Tokens by node, tokens that each request commits, and the nodes that it accepted [rows, depth], the rest -1."""


def verify_by_drawing(
    runner: Any,
    stock: Callable[..., Verdicts],
    verify_input: Any,
    batch: Any,
    logits_output: Any,
    grammar_mask: Any = None,
    **options: Any,
) -> Verdicts:
    """What `eagle_sample` returns; steps in which nothing is drawn are left to it.

    Args:
        runner: SGLang's `ModelRunner` of the target, whose sampler draws.
        stock: `eagle_sample`, whose arguments the others are.
        verify_input: the trees, `NgramVerifyInput`.
        batch: `ScheduleBatch`.
        logits_output: `next_token_logits` are [rows · nodes, V].
        grammar_mask: of the nodes; None: there are no grammars.
        options: of `stock`.
    """
    info = batch.sampling_info
    if batch.forward_mode.is_idle() or (info.is_all_greedy and not info.has_custom_logit_processor):
        return stock(verify_input, batch, logits_output, grammar_mask, **options)
    nodes = verify_input.draft_token_num
    logits = logits_output.next_token_logits
    per_node = spread(info, nodes, grammar_mask)
    per_node.apply_logits_bias(logits)
    if info.has_custom_logit_processor:
        apply_custom_logit_processor(logits, info, nodes)
    most_likely = logits.argmax(dim=1)
    own_output = copy.copy(logits_output)
    own_output.next_token_logits = logits.clone() if batch.return_logprob else logits
    draws = runner.sampler(own_output, per_node, False, [], [], verify_input.positions).long()
    return accept(verify_input, torch.where(per_node.top_ks <= GREEDY_TOP_K, most_likely, draws))


def spread(info: Any, nodes: int, grammar_mask: Any) -> Any:
    """`SamplingBatchInfo` of requests as that of their nodes, without what is applied elsewhere or counts steps."""
    per_node = copy.copy(info)
    for name in OF_REQUESTS:
        if (value := getattr(info, name)) is not None:
            setattr(per_node, name, value.repeat_interleave(nodes, dim=0))
    per_node.grammar_mask = grammar_mask
    per_node.penalizer_orchestrator = per_node.sampling_mask_batch_indices = None
    per_node.has_custom_logit_processor = False
    return per_node


def accept(verify_input: Any, draws: torch.Tensor) -> Verdicts:
    """Walk each tree along the drawn tokens [rows · nodes]; all ranks go where the first one went."""
    candidates = verify_input.draft_token.reshape(-1, verify_input.draft_token_num)
    rows, device = len(candidates), draws.device
    walk = verify_tree_greedy_func(
        predicts=torch.zeros(draws.shape, dtype=torch.int32, device=device),
        accept_index=torch.full((rows, verify_input.max_tree_depth), -1, dtype=torch.int32, device=device),
        accept_token_num=torch.empty((rows,), dtype=torch.int32, device=device),
        candidates=candidates,
        retrieve_index=verify_input.retrieve_index,
        retrieve_next_token=verify_input.retrieve_next_token,
        retrieve_next_sibling=verify_input.retrieve_next_sibling,
        target_predict=draws.reshape(candidates.shape),
        topk=verify_input.tree_topk,
    )
    predict, accept_index, accepted = (get_parallel().tp_group.broadcast(each, src=0) for each in walk)
    return predict, accepted + 1, accept_index
