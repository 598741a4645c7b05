"""EAGLE's rows behind the engine interface: the first token of a text has none.

No feature comes before the first token, so published code begins with the second one: its row is the first that
attention sees, at position 0. To the caller row r is token r, as anywhere; here it is row r - 1 of a plain packed
engine, and the first token has equal logits for all ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from paceline.drafters.heads.eagle import EagleNetwork
from paceline.drafters.heads.own_features import RowInputs, RowOutputs
from paceline.drafters.heads.target_features import FeatureDraft
from paceline.engine.attention import whole_context
from paceline.engine.checks import refuse_rope
from paceline.engine.cpu.linear import can_pack, pack_linears
from paceline.engine.cpu.row_products import PanelLinear
from paceline.engine.cpu.thread_pool import ThreadPool
from paceline.engine.decoder import panel_dtype
from paceline.engine.fingerprint import numeric_fingerprint
from paceline.engine.forward import Attender, attending
from paceline.engine.hidden_states import States
from paceline.engine.interface import NO_PREFIX, EngineInfo, Logits, Prefix, StepItem, StepPlan
from paceline.engine.kv import KVShape, LayerShape
from paceline.engine.ledger import LedgerEngine
from paceline.engine.memory import plan_memory
from paceline.engine.transformer import ServedDecoder, TransformerEngine
from paceline.engine.weights import set_threads
from paceline.models.tokenizer import Tokenizer
from paceline.protocol.errors import InvalidInput
from paceline.protocol.handshake import Fingerprint
from paceline.protocol.proposal import ROOT
from paceline.runtime.config import EngineSettings

EagleDraft = FeatureDraft[EagleNetwork]


class _PackedRows(TransformerEngine):
    """A packed engine whose rows read features beside their tokens."""

    def __init__(self, decoder: ServedDecoder) -> None:
        super().__init__(decoder)
        self._features = torch.empty(0)
        self._outputs = torch.empty(0)

    def run(self, plan: StepPlan, features: torch.Tensor) -> RowOutputs:
        """Run one step whose rows read `features` [rows, hidden], in the order of the plan."""
        self._features = features
        return RowOutputs(self.step(plan), self._outputs)

    def _forward_with_states(
        self,
        attender: Attender,
        tokens: list[int],
        positions: list[int],
        logit_rows: list[int],
        layers: frozenset[int],
    ) -> tuple[torch.Tensor, States]:
        assert not layers, "a draft offers no hidden states"
        network: Any = self._model
        device = self._features.device
        with attending(attender):
            outputs = network(
                torch.tensor([tokens], device=device), self._features[None], torch.tensor([positions], device=device)
            )
        self._outputs = outputs[0]
        logits: torch.Tensor = network.logits(outputs[0, torch.tensor(logit_rows, dtype=torch.long, device=device)])
        return logits, {}


class EagleRows(LedgerEngine[torch.Tensor]):
    """A `RowNetwork` (`paceline.drafters.heads.own_features`), whose contracts its methods keep."""

    def __init__(self, draft: EagleDraft, decoder: ServedDecoder) -> None:
        """Begin with no sessions; `decoder.model` is the draft's network, ready to run."""
        super().__init__(decoder.info, decoder.settings)
        self._network = draft.network
        vocab_size = decoder.info.fingerprint.vocab_size
        self._ids = draft.head_ids(vocab_size)
        self._rows = _PackedRows(decoder)
        self.need, self.feature_width = draft.need, draft.network.feature_width
        self.empty_feature = draft.network.embed_tokens.weight.new_zeros(draft.network.hidden_size)

    def project(self, rows: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return self._network.project(rows)

    def open(self, session: int, max_rows: int, prefix: Prefix = NO_PREFIX) -> int:  # noqa: D102
        self._ledger.open(session, max_rows)
        self._rows.open(session, max_rows)
        return 0

    def close(self, session: int) -> None:  # noqa: D102
        self._ledger.close(session)
        self._rows.close(session)

    def check(self, plan: StepPlan) -> None:  # noqa: D102
        self._ledger.check(plan)
        for item in plan.items:
            if item.trunk == 0 and ROOT in item.parents[1:]:
                row = item.parents.index(ROOT, 1)
                raise InvalidInput.of(f"session {item.session} parent of row {row}", ROOT, "a row: texts begin once")

    @torch.inference_mode()
    def compute(self, plan: StepPlan, inputs: RowInputs) -> RowOutputs:  # noqa: D102
        self._ledger.apply(plan)
        items, features = [], []
        start = 0
        for item in plan.items:
            end = start + len(item.token_ids)
            later = without_first(item)
            if later is not None:
                items.append(later)
                features.append(inputs.features[end - len(later.token_ids) : end])
            start = end
        outputs = self._rows.run(StepPlan(tuple(items)), torch.cat(features)) if items else None
        return self._with_first_rows(plan, outputs)

    def _with_first_rows(self, plan: StepPlan, outputs: RowOutputs | None) -> RowOutputs:
        """The outputs of a step, with zeros and equal logits for first tokens."""
        logits = iter(outputs.logits if outputs is not None else ())
        item_logits: list[Logits] = []
        features: list[torch.Tensor] = []
        start = 0
        for item in plan.items:
            first = item.base_length == 0
            rows = len(item.token_ids) - first
            places = [place for place, row in enumerate(item.logit_rows) if not (first and row == 0)]
            item_logits.append(self._scatter(len(item.logit_rows), places, next(logits) if rows else None))
            features += [self.empty_feature[None]] * first
            if outputs is not None:
                features.append(outputs.features[start : start + rows])
            start += rows
        return RowOutputs(item_logits, torch.cat(features))

    def _scatter(self, count: int, places: Sequence[int], logits: Logits | None) -> Logits:
        """Logits [places, head size] → [count, V]: -inf for ids that the draft lacks, equal without logits."""
        wide = np.full((count, self.info.fingerprint.vocab_size), -np.inf, np.float32)
        wide[:, self._ids] = 0.0
        if logits is not None:
            wide[np.array(places, np.intp)[:, None], self._ids] = logits[:, : len(self._ids)]
        return wide


def without_first(item: StepItem) -> StepItem | None:
    """The same step for a session whose rows begin with the second token; None: it has no such rows.

    A text has one first token, so if that is a row of the tree, all others descend from it.
    """
    first = item.base_length == 0
    if len(item.token_ids) == first:
        return None
    parents = item.parents
    if item.trunk == 0:
        parents = tuple(parent - 1 for parent in item.parents[1:])
    return replace(
        item,
        base_length=max(item.base_length - 1, 0),
        token_ids=item.token_ids[first:],
        parents=parents,
        kept_rows=tuple(row - 1 for row in item.kept_rows if row),
        logit_rows=tuple(row - first for row in item.logit_rows if row >= first),
        trunk_length=max(item.trunk - 1, 0),
    )


def build_eagle_rows(draft: EagleDraft, tokenizer: Tokenizer, settings: EngineSettings, name: str) -> EagleRows:
    """Make the rows of a loaded draft: plan its memory and pack its products.

    Raises:
        InvalidInput: its context or its memory doesn't allow the settings.
        Unsupported: rotations that depend on the batch.
    """
    set_threads(settings.threads)
    network: Any = draft.network  # has all that is used of a transformers model below
    network.train(False)
    network.requires_grad_(False)
    config = network.config
    max_length = min(settings.max_model_len or config.max_position_embeddings, config.max_position_embeddings)
    refuse_rope(config, max_length)
    shape = _kv_shape(draft.network)
    facts = whole_context(shape)
    memory = plan_memory(network, settings, facts, max_length, packs=can_pack(network))
    # Beside keys and values a row keeps its input and its output feature.
    row_bytes = shape.row_bytes + 2 * draft.network.hidden_size * shape.dtype.itemsize
    panels = panel_dtype(network, settings)
    numeric = numeric_fingerprint(network, max_length, panels=panels)
    fingerprint = Fingerprint(name, tokenizer.fingerprint, tokenizer.vocab_size, numeric)
    if panels is not None:
        pool = ThreadPool(torch.get_num_threads())
        pack_linears(network, lambda linear: PanelLinear(linear, pool, panels))
    elif can_pack(network):
        pack_linears(network)
    info = EngineInfo(fingerprint, max_length, memory.kv // row_bytes)
    return EagleRows(draft, ServedDecoder(network, info, facts, settings))


def _kv_shape(network: EagleNetwork) -> KVShape:
    """The shape of a KV row of its layers."""
    config, layers = network.config, network.layers
    attention: Any = layers[0].self_attn
    groups = config.num_attention_heads // config.num_key_value_heads
    layer = LayerShape(config.num_key_value_heads, attention.head_dim, attention.head_dim, groups)
    return KVShape((layer,) * len(layers), network.dtype, network.device)
