"""Coupled sampling for vLLM's V2 model runner: a seed is one text, with drafts and without, whatever drafts.

vLLM decides about a drafted token by chance, so a seed's text depends on drafting. This logits processor draws each
row's token itself, by the noise that `paceline.sampling.racing` defines of seed and position, and hands on a row that
holds this token alone. Then a drafted token is accepted if it is the drawn one, and what vLLM draws in the place of
another one, or behind the last, is the drawn one, too.

Read in vLLM 0.32 and 0.33: `vllm/v1/worker/gpu/sample/logits_processor/interface.py`, and the rule in
`vllm/v1/worker/gpu/spec_decode/rejection_sampler_utils.py`.
"""

from __future__ import annotations

import secrets
from typing import Any

import torch
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

from paceline.engine.cuda.noise import check_race, log_exponentials, words
from paceline.protocol.errors import require
from paceline.sampling.noise import WORD, Stream

EXACT_RULES = ("standard", "block")
"""Values of `speculative_config.rejection_sample_method` under which a row of one token decides."""


class CoupledSampling(LogitsProcessor):  # type: ignore[misc]  # vLLM is where it runs
    """Draws by seed and position; requests of temperature 0 are left to vLLM.

    Args:
        vllm_config: vLLM's `VllmConfig`.
        req_states: vLLM's `LogitsProcRequestState`.

    Raises:
        InvalidInput: the rejection sampler is set to accept what it would not draw.
        Unsupported: the device's noise is not the reference's.
    """

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        speculation = vllm_config.speculative_config
        rule = EXACT_RULES[0] if speculation is None else speculation.rejection_sample_method
        require(rule in EXACT_RULES, "rejection_sample_method", rule, f"one of {', '.join(EXACT_RULES)}")
        check_race(req_states.device)
        slots = req_states.max_num_reqs
        # Temperature (0: not drawn here), min_p, top_k and top_p of each slot, and its seed's low and high word.
        self._chains, self._seeds = torch.zeros(slots, 4), torch.zeros(slots, 2, dtype=torch.int64)
        self._own_chains, self._own_seeds = (each.to(req_states.device) for each in (self._chains, self._seeds))
        self._vocab_size = req_states.vocab_size

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Note a slot's request; returns whether its tokens are drawn here."""
        own = sampling_params
        seed = secrets.randbits(64) if own.seed is None else own.seed
        top_k = own.top_k if own.top_k > 0 else self._vocab_size
        self._chains[req_idx] = torch.tensor((own.temperature, own.min_p, min(top_k, self._vocab_size), own.top_p))
        self._seeds[req_idx] = torch.tensor((seed & WORD, seed >> 32 & WORD))
        return bool(own.temperature > 0)

    def apply_staged_writes(self) -> None:
        """Bring what `add_request` noted to the device."""
        self._own_chains.copy_(self._chains)
        self._own_seeds.copy_(self._seeds)

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Rows [rows, V] of the drawn token alone (0, elsewhere -inf); those of other requests as they were."""
        chains = self._chains[torch.from_numpy(ctx.idx_mapping_np).long()]
        if not bool((chains[:, 0] > 0).any()):
            return logits
        slots = ctx.expanded_idx_mapping.long()
        temperature, min_p, top_k, top_p = self._own_chains[slots].unbind(1)
        is_drawn = (temperature > 0)[:, None]
        scores = torch.where(is_drawn, logits / temperature[:, None], logits)
        if bool((chains[:, 1] > 0).any()):
            scores = _within_min_p(scores, min_p)
        if bool((chains[:, 2] < self._vocab_size).any() or (chains[:, 3] < 1).any()):
            scores = _within_top(scores, top_k, top_p)
        positions = ctx.pos.long() + 1  # of the drawn token, which follows the row's own
        counters = torch.stack((positions, torch.full_like(positions, Stream.DRAFT), *self._own_seeds[slots].T), 1)
        winners = (scores - log_exponentials(words(counters, scores.shape[1]))).argmax(dim=1, keepdim=True)
        points = torch.full_like(logits, -torch.inf).scatter_(1, winners, 0.0)
        return torch.where(is_drawn, points, logits)


def _within_min_p(scores: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Scores of tokens of at least `min_p` times the largest probability; -inf elsewhere."""
    least = scores.amax(dim=1, keepdim=True) + min_p.log()[:, None]
    return scores.masked_fill(scores < least, -torch.inf)


def _within_top(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Scores of the `top_k` largest, and of these the fewest whose mass reaches `top_p`; -inf elsewhere."""
    values, ids = scores.sort(dim=1, descending=True, stable=True)
    ranks = torch.arange(scores.shape[1], device=scores.device)
    values = values.masked_fill(ranks >= top_k[:, None], -torch.inf)
    before = values.softmax(dim=1).cumsum(dim=1).roll(1, dims=1)
    before[:, 0] = 0.0
    values = values.masked_fill(before >= top_p[:, None], -torch.inf)
    return torch.full_like(scores, -torch.inf).scatter_(1, ids, values)
