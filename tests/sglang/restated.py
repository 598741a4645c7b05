"""What Paceline's plugin uses of SGLang 0.5.23, restated. `test_restated` compares it with SGLang's source.

Requests are decoded one step behind, as under SGLang's overlap schedule, or at once.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

TOP_K_ALL = 1 << 30
WORD = 0xFFFFFFFF
SPEC = SimpleNamespace(
    speculative_num_draft_tokens=4,
    speculative_num_steps=3,
    speculative_eagle_topk=1,
    speculative_ngram_max_trie_depth=18,
)
REGISTERED: dict[str, Any] = {}


@dataclass
class Group:
    """A group of ranks; `others` is what rank 0 said, for a rank that isn't it."""

    rank_in_group: int = 0
    said: list[Any] = field(default_factory=list)

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        if self.rank_in_group == src:
            self.said.append(obj)
            return obj
        return self.said[-1]

    def broadcast(self, input_: torch.Tensor, src: int = 0) -> torch.Tensor:
        return input_


PARALLEL = SimpleNamespace(tp_group=Group())


class SpeculativeAlgorithm(enum.Enum):
    NGRAM = enum.auto()
    NONE = enum.auto()

    @classmethod
    def register(
        cls,
        name: str,
        *,
        supports_overlap: bool = False,
        validate_server_args: Any = None,
        spec_class: Any = None,
    ) -> Callable[[Any], Any]:
        def decorator(factory: Any) -> Any:
            REGISTERED[name] = spec_class(
                name=name,
                factory=factory,
                supports_overlap=supports_overlap,
                validate_server_args=validate_server_args,
            )
            return factory

        return decorator

    def create_future_map(
        self,
        device: Any,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> Any:
        return (self, device, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)


class CustomSpecAlgo:
    def __init__(
        self, name: str, factory: Any, *, supports_overlap: bool = False, validate_server_args: Any = None
    ) -> None:
        self.name, self.factory, self.supports_overlap = name, factory, supports_overlap

    def is_ngram(self) -> bool:
        return False

    def has_draft_kv(self) -> bool:
        return True

    def handle_server_args(self, server_args: Any) -> None:
        pass

    def create_worker(self, server_args: Any) -> type:
        worker: type = self.factory(server_args)
        return worker


class HookType(enum.Enum):
    AROUND = "around"


class HookRegistry:
    hooks: dict[str, Any] = {}  # noqa: RUF012  # as theirs

    @classmethod
    def register(cls, target: str, hook: Any, hook_type: HookType = HookType.AROUND, *, source: Any = None) -> None:
        cls.hooks[target] = hook

    @classmethod
    def apply_hooks(cls) -> None:
        for target, hook in cls.hooks.items():
            module, _, name = target.rpartition(".")
            setattr(sys.modules[module], name, partial(hook, eagle_sample))


@dataclass
class SamplingParams:
    temperature: float = 1.0
    top_k: int = TOP_K_ALL
    top_p: float = 1.0
    min_p: float = 0.0
    sampling_seed: int | None = 1
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        if self.temperature == 0:
            self.temperature, self.top_k = 1.0, 1


class SamplingBatchInfo:
    """Of these requests; `logit_bias` is one for all of them."""

    def __init__(self, params: Sequence[SamplingParams], logit_bias: torch.Tensor | None = None) -> None:
        def column(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.tensor([getattr(each, name) for each in params], dtype=dtype)

        self.temperatures = column("temperature").view(-1, 1)
        self.top_ps, self.top_ks, self.min_ps = column("top_p"), column("top_k", torch.int32), column("min_p")
        is_seeded = all(each.sampling_seed is not None for each in params)
        self.sampling_seed = column("sampling_seed", torch.int64) if is_seeded else None
        self.is_all_greedy = all(each.top_k <= 1 for each in params)
        self.acc_additive_penalties = self.acc_scaling_penalties = None
        self.logit_bias = None if logit_bias is None else logit_bias.expand(len(params), -1)
        self.grammar_mask: Any = None
        self.penalizer_orchestrator: Any = SimpleNamespace(is_required=True, apply=None)
        self.sampling_mask_batch_indices: Any = None
        self.has_custom_logit_processor = False

    def apply_logits_bias(self, logits: torch.Tensor) -> None:
        if self.penalizer_orchestrator is not None:
            raise AssertionError("penalties of requests, not of nodes")
        if self.grammar_mask is not None:
            self.grammar_mask.apply(logits)
        if self.logit_bias is not None:
            logits.add_(self.logit_bias)


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    def rotated(value: torch.Tensor, bits: int) -> torch.Tensor:
        return ((value << bits) | (value >> (32 - bits))) & WORD

    def mixed(hashed: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        block = rotated((block * 0xCC9E2D51) & WORD, 15)
        return (rotated(hashed ^ ((block * 0x1B873593) & WORD), 13) * 5 + 0xE6546B64) & WORD

    seed, positions = seed.long()[:, None], positions.long()[:, None]
    hashed = torch.zeros_like(seed)
    for block in (seed & WORD, (seed >> 32) & WORD, positions, col_indices.long()[None, :]):
        hashed = mixed(hashed, block)
    hashed = hashed ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hashed = ((hashed ^ (hashed >> shift)) * factor) & WORD
    return hashed ^ (hashed >> 16)


def multinomial_with_seed(logprobs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    x = murmur_hash32(seed, positions, torch.arange(logprobs.shape[1])).double() / WORD
    x = x.log().clamp(min=torch.finfo(x.dtype).min, max=-(2.0**-32)).neg().log().neg()
    return (x + logprobs.double()).argmax(dim=1, keepdim=True)


class Sampler:
    def forward(
        self,
        logits_output: Any,
        sampling_info: SamplingBatchInfo,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int]],
        positions: torch.Tensor,
        *,
        logprob_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        info = sampling_info
        logits: torch.Tensor = logits_output.next_token_logits
        assert len(logits) == len(info.temperatures) == len(positions)
        if info.is_all_greedy:
            return logits.argmax(-1)
        logits.div_(info.temperatures)
        logits[:] = torch.softmax(logits, dim=-1)  # in place, as theirs
        probs, ids = logits.sort(dim=-1, descending=True)
        before = probs.cumsum(dim=-1) - probs
        ranks = torch.arange(probs.shape[1])
        probs = probs.masked_fill((ranks >= info.top_ks[:, None]) | (before > info.top_ps[:, None]), 0.0)
        probs = probs.masked_fill(probs < probs[:, :1] * info.min_ps[:, None], 0.0)
        if info.sampling_seed is None:
            drawn = torch.multinomial(probs, num_samples=1)
        else:
            drawn = multinomial_with_seed(probs.double().log(), info.sampling_seed, positions)
        return ids.gather(1, drawn).view(-1).int()

    __call__ = forward


def apply_custom_logit_processor(
    logits: torch.Tensor, sampling_batch_info: Any, num_tokens_in_batch: int = 1
) -> None:
    assert len(logits) == len(sampling_batch_info.temperatures) * num_tokens_in_batch
    logits[:, sampling_batch_info.forbidden] = -torch.inf


def verify_tree_greedy_func(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    for row in range(len(candidates)):
        node, accepted = 0, 0
        accept_index[row, 0] = retrieve_index[row, 0]
        while True:
            drawn = target_predict[row, node]
            predicts[retrieve_index[row, node]] = drawn
            child = int(retrieve_next_token[row, node])
            while child >= 0 and candidates[row, child] != drawn:
                child = int(retrieve_next_sibling[row, child])
            if child < 0:
                break
            node, accepted = child, accepted + 1
            accept_index[row, accepted] = retrieve_index[row, node]
        accept_token_num[row] = accepted
    return predicts, accept_index, accept_token_num


def reconstruct_indices_from_tree_mask(mask: np.ndarray[Any, Any], rows: int, nodes: int) -> Any:
    """Depths, next children and next siblings [rows, nodes] of ancestor masks, as the kernel's head states them."""
    ancestors = mask.reshape(rows, nodes, nodes) & np.tri(nodes, k=-1, dtype=bool)
    parents = np.where(ancestors.any(-1), (ancestors * np.arange(nodes)).argmax(-1), -1)
    links = np.full((2, rows, nodes), -1)
    for row in range(rows):
        for node in range(nodes):
            later = range(node + 1, nodes)
            links[0, row, node] = next((k for k in later if ancestors[row, k, node]), -1)
            siblings = (k for k in later if parents[row, k] == parents[row, node] >= 0)
            links[1, row, node] = next(siblings, -1)
    return ancestors.sum(-1), *links


def eagle_sample(
    verify_input: Any,
    batch: Any,
    logits_output: Any,
    grammar_mask: Any = None,
    uno_target_max_top_k: int | None = None,
    *,
    watermark_state: Any = None,
    watermark_full_mask: bool = True,
) -> Any:
    """Their greedy path; the other one is what the plugin replaces."""
    assert batch.sampling_info.is_all_greedy, "SGLang decides by chance"
    rows, nodes = len(batch.reqs), verify_input.draft_token_num
    predict, index, accepted = verify_tree_greedy_func(
        predicts=torch.zeros(rows * nodes, dtype=torch.int32),
        accept_index=torch.full((rows, verify_input.max_tree_depth), -1, dtype=torch.int32),
        accept_token_num=torch.empty(rows, dtype=torch.int32),
        candidates=verify_input.draft_token.reshape(rows, nodes),
        retrieve_index=verify_input.retrieve_index,
        retrieve_next_token=verify_input.retrieve_next_token,
        retrieve_next_sibling=verify_input.retrieve_next_sibling,
        target_predict=logits_output.next_token_logits.argmax(-1).reshape(rows, nodes),
    )
    return predict, accepted + 1, index


class NGRAMWorker:
    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        self.server_args, self.target_worker = server_args, target_worker
        self.enable_overlap = not server_args.disable_overlap_schedule
        self.draft_token_num = SPEC.speculative_num_draft_tokens
        self.max_trie_depth = SPEC.speculative_ngram_max_trie_depth
        self._prev_decode_rids: set[str] = set()
        self.ngram_corpus: Any = None

    def clear_cache_pool(self) -> None:
        self.ngram_corpus.reset()
        self._prev_decode_rids = set()

    def _efficient_concat_last_n(self, seq1: list[int], seq2: list[int], n: int) -> list[int]:
        return [*seq1, *seq2][-n:]

    def _prepare_draft_tokens(self, batch: Any) -> tuple[Any, Any]:
        prev_tokens, prev_lens = [], [0] * len(batch.reqs)
        if self.enable_overlap and not batch.grammar_needs_sync():
            prev_tokens = batch.spec_info.accept_tokens.cpu().tolist()
            prev_lens = batch.spec_info.accept_lens.cpu().tolist()
        self.prev_token_ids, self.prev_accept_lens = prev_tokens, prev_lens
        self.ngram_corpus.synchronize()
        tokens, lengths = [], []
        for row, req in enumerate(batch.reqs):
            first = row * self.draft_token_num
            output = [*req.output_ids, *prev_tokens[first : first + prev_lens[row]]]
            prompt = [*req.origin_input_ids_unpadded]
            tokens.append(self._efficient_concat_last_n(prompt, output, self.max_trie_depth))
            lengths.append(len(prompt) + len(output))
        answer: tuple[Any, Any] = self.ngram_corpus.batch_get([req.rid for req in batch.reqs], tokens, lengths)
        return answer

    def _update_ngram_corpus(self, batch: Any) -> None:
        self.ngram_corpus.batch_put([[*req.output_ids] for req in batch.reqs])

    def forward_batch_generation(self, batch: Any, on_publish: Any = None, pp_proxy_tensors: Any = None) -> Any:
        rows, nodes = len(batch.reqs), self.draft_token_num
        ids, mask = self._prepare_draft_tokens(batch)
        assert ids.dtype == np.int64
        assert (ids.shape, mask.shape) == ((rows * nodes,), (rows * nodes * nodes,))
        depths, next_token, next_sibling = reconstruct_indices_from_tree_mask(mask, rows, nodes)
        batch.verify_input = verify_input = SimpleNamespace(
            draft_token=torch.from_numpy(ids),
            draft_token_num=nodes,
            max_tree_depth=nodes,
            tree_topk=-1,
            mask=mask.reshape(rows, nodes, nodes),
            positions=torch.from_numpy(depths + np.array(batch.seq_lens)[:, None]).reshape(-1),
            retrieve_index=torch.arange(rows * nodes).reshape(rows, nodes),
            retrieve_next_token=torch.from_numpy(next_token),
            retrieve_next_sibling=torch.from_numpy(next_sibling),
        )
        logits_output = self.target_worker.forward_batch_generation(batch, is_verify=True)
        predict, accept_lens, accept_index = sys.modules["sglang.srt.speculative.ngram_worker"].eagle_sample(
            verify_input, batch, logits_output, batch.grammar_mask, watermark_state=None
        )
        accept_tokens = predict[accept_index.long()].flatten()
        self._update_ngram_corpus(batch)
        current = {req.rid for req in batch.reqs}
        if self._prev_decode_rids - current:
            self.ngram_corpus.erase_match_state([*(self._prev_decode_rids - current)])
        self._prev_decode_rids = current
        return SimpleNamespace(accept_tokens=accept_tokens, accept_lens=accept_lens)


MODULES: dict[str, dict[str, Any]] = {
    "sglang.version": {"__version__": "0.5.23"},
    "sglang.kernels.ops.speculative.spec_tree": {"verify_tree_greedy_func": verify_tree_greedy_func},
    "sglang.srt.layers.sampler": {"apply_custom_logit_processor": apply_custom_logit_processor, "Sampler": Sampler},
    "sglang.srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
    "sglang.srt.runtime_context": {"get_parallel": lambda: PARALLEL, "get_spec": lambda: SPEC},
    "sglang.srt.speculative.ngram_worker": {"NGRAMWorker": NGRAMWorker, "eagle_sample": eagle_sample},
    "sglang.srt.speculative.spec_info": {"SpeculativeAlgorithm": SpeculativeAlgorithm},
    "sglang.srt.speculative.spec_registry": {"CustomSpecAlgo": CustomSpecAlgo},
}


def install(patch: pytest.MonkeyPatch) -> None:
    """Put the restated modules in SGLang's place, and forget what was made of others."""
    for name, members in MODULES.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in sys.modules or end == len(parts):
                patch.setitem(sys.modules, path, ModuleType(path))
        vars(sys.modules[name]).update(members)
    for name in [each for each in sys.modules if each.startswith("paceline_sglang.")]:
        if name != "paceline_sglang.trees":
            patch.delitem(sys.modules, name)
    REGISTERED.clear()
    HookRegistry.hooks.clear()
    patch.setattr(PARALLEL, "tp_group", Group())
