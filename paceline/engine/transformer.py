"""Any transformers decoder as an engine: one forward pass over the packed rows of many sessions.

Attention writes each session's new keys and values behind its kept ones. Sessions of many rows attend one by one in
the library's products; on CPUs those of few rows attend all together in a compiled loop.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional
from transformers import PreTrainedModel

from paceline.engine.blocks import BlockStore, Rows
from paceline.engine.cpu.row_attention import DTYPE as ROW_DTYPE
from paceline.engine.cpu.row_attention import EVERY_KEY, FEW_KEYS, RowAttention, is_few
from paceline.engine.forward import AttentionCall, packed_forward
from paceline.engine.interface import NO_PREFIX, EngineInfo, Logits, Prefix, StepItem, StepPlan
from paceline.engine.kv import KVShape, SessionKV
from paceline.engine.ledger import LedgerEngine, depths
from paceline.runtime.config import EngineSettings
from paceline.sampling.tree import ancestor_mask

if TYPE_CHECKING:
    from paceline.engine.cpu.row_decoder import RowDecoder


@dataclass(frozen=True)
class _Segment:
    """One session's rows in a step: packed rows [low, high), KV rows [base, total)."""

    kv: SessionKV
    low: int
    high: int
    base: int
    mask: torch.Tensor | None  # [groups · rows, total] additive; None: one row, or plainly causal
    causal: bool

    @property
    def total(self) -> int:
        return self.base + self.high - self.low


@dataclass(frozen=True)
class _StepAttention:
    """Attention of one step: sessions of many rows one by one, those of few rows all at once."""

    segments: tuple[_Segment, ...]
    few: RowAttention | None

    def attend(self, call: AttentionCall) -> torch.Tensor:
        heads, rows, head_dim = call.query.shape[1:]
        out = call.query.new_empty((1, rows, heads, head_dim))
        if self.few is not None:
            self.few.attend(call, out)
        for segment in self.segments:
            out[:, segment.low : segment.high] = _attend_segment(segment, call).transpose(1, 2)
        return out


def _attend_segment(segment: _Segment, call: AttentionCall) -> torch.Tensor:  # [1, heads, rows, head_dim]
    rows = slice(segment.low, segment.high)
    held = segment.kv.keys_and_values(call.layer)
    held[0, :, segment.base : segment.total] = call.key[0, :, rows]
    held[1, :, segment.base : segment.total] = call.value[0, :, rows]
    keys, values = held[:, None, :, : segment.total]  # each [1, kv_heads, total, head_dim]
    own = call.query[:, :, rows]
    _, heads, count, head_dim = own.shape
    kv_heads = keys.shape[1]
    if segment.causal:
        return functional.scaled_dot_product_attention(
            own, keys, values, is_causal=True, scale=call.scaling, enable_gqa=heads != kv_heads
        )
    # The heads that share keys become rows of one head: a quarter faster than enable_gqa, same numbers.
    packed = own.reshape(1, kv_heads, heads // kv_heads * count, head_dim)
    attended = functional.scaled_dot_product_attention(
        packed, keys, values, attn_mask=segment.mask, scale=call.scaling
    )
    return attended.reshape(own.shape)


class ComputeThreads:
    """Torch keeps its thread count per calling thread; the executor's must have that of the one that loads."""

    def __init__(self) -> None:
        self._threads = torch.get_num_threads()
        self._thread_id: int | None = None

    def bind(self) -> None:
        """Set the calling thread's count, if it isn't set."""
        if self._thread_id != threading.get_ident():
            torch.set_num_threads(self._threads)
            self._thread_id = threading.get_ident()


@dataclass(frozen=True, eq=False)
class ServedDecoder:
    """A decoder that has been examined, and how it is to be served."""

    model: PreTrainedModel
    info: EngineInfo
    kv_shape: KVShape
    settings: EngineSettings


class DecoderEngine(LedgerEngine[Rows]):
    """What all engines of transformers decoders have: the model, and its compute threads."""

    def __init__(self, decoder: ServedDecoder, blocks: BlockStore[Rows] | None = None) -> None:
        super().__init__(decoder.info, decoder.settings, blocks)
        self._model = decoder.model
        self._kv_shape = decoder.kv_shape
        self._threads = ComputeThreads()


class TransformerEngine(DecoderEngine[torch.Tensor]):
    """A decoder behind the engine interface; `Engine` says what its methods promise."""

    def __init__(self, decoder: ServedDecoder, row_decoder: RowDecoder | None = None) -> None:
        super().__init__(decoder)
        self.row_decoder = row_decoder
        """Computes whole steps of models whose shape it knows."""
        compiles = self._kv_shape.device.type == "cpu" and self._kv_shape.dtype == ROW_DTYPE
        self.few_keys = EVERY_KEY if row_decoder is not None else FEW_KEYS if compiles else 0
        """What `is_few` takes."""
        self._kv: dict[int, SessionKV] = {}

    @torch.inference_mode()
    def open(self, session: int, max_rows: int, prefix: Prefix = NO_PREFIX) -> int:  # noqa: D102
        blocks = self._ledger.open(session, max_rows, prefix)
        kv = self._kv[session] = SessionKV(self._kv_shape, max_rows)
        start = 0
        for rows in blocks:
            kv.copy_in(start, rows)
            start += rows.shape[3]
        return start

    def close(self, session: int) -> None:  # noqa: D102
        self._ledger.close(session)
        self._kv.pop(session, None)

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> Sequence[Logits]:  # noqa: D102
        self._ledger.check(plan)
        self._threads.bind()
        outputs = self._run(plan)
        self._ledger.share(plan, lambda session, start, end: self._kv[session].copy_out(start, end))
        return outputs

    def _run(self, plan: StepPlan) -> Sequence[Logits]:
        """Compute a checked step, and record it as done before any row changes."""
        segments: list[_Segment] = []
        few: list[tuple[StepItem, SessionKV, int]] = []
        tokens: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        for item in plan.items:
            low = len(tokens)
            kv = self._kv[item.session]
            kv.keep(item.base_length, item.kept_rows)
            if is_few(item, self.few_keys):
                few.append((item, kv, low))
            else:
                segments.append(self._segment(item, kv, low))
            tokens.extend(item.token_ids)
            positions.extend(item.trunk + depth - 1 for depth in depths(item))
            wanted.extend(low + row for row in item.logit_rows)
        attention = RowAttention.of(few) if few else None
        # Kept rows have moved and new ones are written as layers run, so the ledger moves first.
        self._ledger.apply(plan)
        if attention is not None and not segments and self.row_decoder is not None:
            logits = self.row_decoder.logits(tokens, positions, wanted, attention)
        else:
            attender = _StepAttention(tuple(segments), attention)
            logits = packed_forward(self._model, attender, tokens, positions, wanted)
        return self._split(logits, plan)

    def _segment(self, item: StepItem, kv: SessionKV, low: int) -> _Segment:
        new = len(item.token_ids)
        causal = item.is_chain and item.base_length == 0 and new > 1
        sees_all = new == 1 and (item.is_chain or not item.kept_tree)
        mask = None if causal or sees_all else self._mask(item)
        return _Segment(kv, low, low + new, item.base_length, mask, causal)

    def _mask(self, item: StepItem) -> torch.Tensor:
        """Additive mask [groups · new, base + new]: a row sees the trunk, its ancestors and itself."""
        new = len(item.token_ids)
        tree = np.tri(item.tree_rows, dtype=np.bool_) if item.is_chain else ancestor_mask(item.parents)
        seen = tree[item.kept_tree :]  # [new, tree rows]
        mask = torch.zeros((new, item.base_length + new), dtype=self._kv_shape.dtype)
        mask[:, item.trunk :].masked_fill_(torch.from_numpy(~seen), float("-inf"))
        return mask.to(self._kv_shape.device).repeat(self._kv_shape.groups, 1)

    def _on_host(self, logits: torch.Tensor) -> Logits:
        """[rows, tensor width] → [rows, V]."""
        found: Logits = logits[:, : self.info.fingerprint.vocab_size].float().cpu().contiguous().numpy()
        return found

    def _split(self, logits: torch.Tensor, plan: StepPlan) -> list[Logits]:
        rows = self._on_host(logits)
        outputs: list[Logits] = []
        start = 0
        for item in plan.items:
            outputs.append(rows[start : start + len(item.logit_rows)])
            start += len(item.logit_rows)
        return outputs
