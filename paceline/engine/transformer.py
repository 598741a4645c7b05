"""Any transformers decoder as an engine: one forward pass over the packed rows of many sessions.

Attention writes each session's new keys and values behind its kept ones. Sessions of many rows attend one by one in
the library's products; on CPUs those of few rows attend all together in a compiled loop.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from paceline.engine.attention import AttentionFacts, View, packed_attention, position_bias, view_of, visible_keys
from paceline.engine.blocks import BlockStore, Rows
from paceline.engine.cpu.row_attention import DTYPE as ROW_DTYPE
from paceline.engine.cpu.row_attention import EVERY_KEY, FEW_KEYS, RowAttention, is_few
from paceline.engine.features import FeatureRows
from paceline.engine.forward import Attender, AttentionCall, packed_forward
from paceline.engine.hidden_states import KeptStates, States, capture_states
from paceline.engine.index import INDICES, IndexCall
from paceline.engine.interface import NO_PREFIX, EngineInfo, Logits, Prefix, StepItem, StepPlan
from paceline.engine.kv import KVRows, KVShape, SessionKV
from paceline.engine.ledger import LedgerEngine, depths, key_positions
from paceline.engine.own_attention import ALIBI
from paceline.engine.states import SessionStates, StepStates
from paceline.protocol.features import FeatureNeed
from paceline.runtime.config import EngineSettings

if TYPE_CHECKING:
    from paceline.engine.cpu.row_decoder import RowDecoder


@dataclass(frozen=True)
class _Segment:
    """One session's rows in a step: packed rows [low, high), KV rows [base, total)."""

    kv: SessionKV
    low: int
    high: int
    base: int
    views: tuple[View, ...]
    """The keys that the rows see, by kind of layer."""
    positions: torch.Tensor | None  # [total] of the keys, where scores depend on them
    visible: torch.Tensor | None  # [rows, total], where an index chooses keys

    @property
    def total(self) -> int:
        return self.base + self.high - self.low


@dataclass(frozen=True)
class _StepAttention:
    """Attention of one step: sessions of many rows one by one, those of few rows all at once."""

    segments: tuple[_Segment, ...]
    row_attention: tuple[RowAttention, ...]
    """By kind of layer; none if no rows are few."""
    kind_of_layer: tuple[int, ...]

    def attend(self, call: AttentionCall) -> torch.Tensor:
        heads, rows = call.query.shape[1:3]
        out = call.query.new_empty((1, rows, heads, call.value.shape[3]))
        kind = self.kind_of_layer[call.layer]
        if self.row_attention:
            self.row_attention[kind].attend(call, out)
        groups = heads // call.key.shape[1]
        views = [View(0, mask.repeat(groups, 1)) for mask in call.extras.get(INDICES) or ()]
        for segment, view in zip(self.segments, views or [each.views[kind] for each in self.segments], strict=True):
            attention = _attend_segment(segment, view, call)
            out[:, segment.low : segment.high] = attention.transpose(1, 2)
        return out

    def choose(self, call: IndexCall) -> tuple[torch.Tensor, ...]:
        """As `paceline.engine.index.Chooser`: an additive mask [rows, total] of each session."""
        return call.masks(
            (slice(each.low, each.high), each.kv.index_keys(call.layer)[: each.total], each.visible)
            for each in self.segments
            if each.visible is not None
        )


def _attend_segment(
    segment: _Segment, view: View, call: AttentionCall
) -> torch.Tensor:  # [1, heads, rows, value_width]
    rows = slice(segment.low, segment.high)
    held_keys, held_values = segment.kv.keys(call.layer), segment.kv.values(call.layer)
    held_keys[:, segment.base : segment.total] = call.key[0, :, rows]
    held_values[:, segment.base : segment.total] = call.value[0, :, rows]
    keys = held_keys[None, :, view.first : segment.total]
    values = held_values[None, :, view.first : segment.total]
    own = call.query[:, :, rows]
    _, heads, count, width = own.shape
    kv_heads = keys.shape[1]
    if view.causal:
        return functional.scaled_dot_product_attention(
            own, keys, values, is_causal=True, scale=call.scaling, enable_gqa=heads != kv_heads
        )
    # The heads that share keys become rows of one head: a quarter faster than enable_gqa, same numbers.
    packed_query = own.reshape(1, kv_heads, heads // kv_heads * count, width)
    mask = view.mask
    if ALIBI in call.extras:
        assert segment.positions is not None, "scores depend on them"
        bias = position_bias(call.extras[ALIBI], segment.positions[view.first :], kv_heads, count)
        mask = bias if mask is None else mask + bias
    attention = packed_attention(call, packed_query, keys, values, mask)
    return attention.reshape(1, heads, count, values.shape[3])


class ComputeThreads:
    """Torch keeps a thread count per calling thread: the executor's thread takes over the loading thread's."""

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
    """A decoder that has been examined, and the settings to serve it with."""

    model: PreTrainedModel
    info: EngineInfo
    attention: AttentionFacts
    settings: EngineSettings

    @property
    def kv_shape(self) -> KVShape:
        """The shape of one KV row."""
        return self.attention.shape


class DecoderEngine(LedgerEngine[Rows]):
    """The base of all engines of transformers decoders: the model, its hidden states, and its compute threads."""

    def __init__(self, decoder: ServedDecoder, blocks: BlockStore[Rows] | None = None) -> None:
        super().__init__(decoder.info, decoder.settings, blocks)
        self._model = decoder.model
        self._kv_shape = decoder.kv_shape
        self.attention = decoder.attention
        """Facts of its attention layers; a self-check may narrow their windows while it runs."""
        self._threads = ComputeThreads()
        self._states = KeptStates()

    def keep_features(self, session: int, need: FeatureNeed) -> None:
        """As `FeatureSource`."""
        self._states.want(session, need)

    def features(self, session: int) -> FeatureRows:
        """As `FeatureSource`."""
        return self._states.rows(session)


class TransformerEngine(DecoderEngine[KVRows]):
    """A decoder behind the engine interface; `Engine` says what its methods promise."""

    def __init__(self, decoder: ServedDecoder, row_decoder: RowDecoder | None = None) -> None:
        super().__init__(decoder)
        self.row_decoder = row_decoder
        """Computes whole steps of models whose shape it knows."""
        on_cpu = self._kv_shape.device.type == "cpu" and self._kv_shape.dtype == ROW_DTYPE
        compiles = on_cpu and decoder.attention.compilable
        self.few_keys = EVERY_KEY if row_decoder is not None else FEW_KEYS if compiles else 0
        """The limit for `is_few`."""
        self._kv: dict[int, SessionKV] = {}
        self._recurrent: dict[int, SessionStates] = {}

    @torch.inference_mode()
    def open(self, session: int, max_rows: int, prefix: Prefix = NO_PREFIX) -> int:  # noqa: D102
        # The state behind a shared block is not kept, so nothing is taken from one.
        blocks = self._ledger.open(session, max_rows, NO_PREFIX if self.attention.mixers else prefix)
        kv = self._kv[session] = SessionKV(self._kv_shape, max_rows)
        if self.attention.mixers:
            self._recurrent[session] = SessionStates(self.attention.mixers, prefix.prompt_rows)
        start = 0
        for rows in blocks:
            kv.copy_in(start, rows)
            start += rows[0].shape[1]
        return start

    def close(self, session: int) -> None:  # noqa: D102
        self._ledger.close(session)
        self._kv.pop(session, None)
        self._recurrent.pop(session, None)
        self._states.close(session)

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> Sequence[Logits]:  # noqa: D102
        self._ledger.check(plan)
        for item in plan.items if self._recurrent else ():
            self._recurrent[item.session].check(item)
        self._threads.bind()
        outputs = self._run(plan)
        self._ledger.share(plan, lambda session, start, end: self._kv[session].copy_out(start, end))
        return outputs

    def _run(self, plan: StepPlan) -> Sequence[Logits]:
        """Compute a checked step; the ledger records it as done before any row changes."""
        segments: list[_Segment] = []
        few: list[tuple[StepItem, SessionKV, int]] = []
        tokens: list[int] = []
        positions: list[int] = []
        logit_rows: list[int] = []
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
            logit_rows.extend(low + row for row in item.logit_rows)
        by_kind = tuple(RowAttention.from_items(few, kind.horizon) for kind in self.attention.kinds) if few else ()
        # Kept rows have moved, and layers write new ones as they run, so the ledger moves first.
        self._ledger.apply(plan)
        layers = self._states.begin(plan)
        recurrent = StepStates.begin(plan, self._recurrent)
        if by_kind and not segments and self.row_decoder is not None:
            logits = self.row_decoder.logits(tokens, positions, logit_rows, by_kind[0], layers)
            states = self.row_decoder.states
        else:
            attender = _StepAttention(tuple(segments), by_kind, self.attention.kind_of_layer)
            with recurrent.running():
                logits, states = self._forward_with_states(attender, tokens, positions, logit_rows, layers)
        self._states.take_packed(plan, states)
        return self._split(logits, plan)

    def _forward_with_states(
        self,
        attender: Attender,
        tokens: list[int],
        positions: list[int],
        logit_rows: list[int],
        layers: frozenset[int],
    ) -> tuple[torch.Tensor, States]:
        """Logits [len(logit_rows), tensor width], and the hidden states of all rows."""
        with capture_states(self._model, layers) as states:
            return self._forward(attender, tokens, positions, logit_rows), states

    def _forward(
        self, attender: Attender, tokens: list[int], positions: list[int], logit_rows: list[int]
    ) -> torch.Tensor:
        """Logits [len(logit_rows), tensor width] of the packed rows of a step."""
        return packed_forward(self._model, attender, tokens, positions, logit_rows)

    def _segment(self, item: StepItem, kv: SessionKV, low: int) -> _Segment:
        causal = not self.attention.terms
        views = tuple(view_of(item, kind, self._kv_shape, causal=causal) for kind in self.attention.kinds)
        has_bias = ALIBI in self.attention.terms
        positions = torch.from_numpy(key_positions(item)).to(self._kv_shape.device) if has_bias else None
        chooses = INDICES in self.attention.terms
        visible = torch.from_numpy(visible_keys(item, None)).to(self._kv_shape.device) if chooses else None
        return _Segment(kv, low, low + len(item.token_ids), item.base_length, views, positions, visible)

    def _on_host(self, logits: torch.Tensor) -> Logits:
        """[rows, tensor width] → [rows, V]."""
        host_logits: Logits = logits[:, : self.info.fingerprint.vocab_size].float().cpu().contiguous().numpy()
        return host_logits

    def _split(self, logits: torch.Tensor, plan: StepPlan) -> list[Logits]:
        rows = self._on_host(logits)
        outputs: list[Logits] = []
        start = 0
        for item in plan.items:
            outputs.append(rows[start : start + len(item.logit_rows)])
            start += len(item.logit_rows)
        return outputs
