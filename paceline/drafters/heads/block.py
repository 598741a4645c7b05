"""Block drafting behind the engine interface.

Rows have no keys or values of their own: a block's rows attend to the context, the target's features of the tokens
before it. The block that predicts what follows a row begins after the last given feature before the row, with the
token of the row's path at that position. It is computed in one pass when a row first needs it, for all sessions of a
step at once, and kept for the session's later rows. Tokens of a path after the block's first change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from paceline.drafters.heads.block_network import BlockNetwork, block_attention
from paceline.drafters.heads.own_features import RowList
from paceline.drafters.heads.target_features import NOTHING, FeatureDraft, SessionFeatures, check_rows
from paceline.engine.attention import whole_context
from paceline.engine.features import FeatureRows
from paceline.engine.fingerprint import numeric_fingerprint
from paceline.engine.interface import NO_PREFIX, EngineInfo, Logits, Prefix, StepItem, StepPlan
from paceline.engine.kv import KVShape, LayerShape
from paceline.engine.ledger import LedgerEngine, depths
from paceline.engine.memory import plan_memory
from paceline.engine.transformer import ComputeThreads
from paceline.models.tokenizer import Tokenizer
from paceline.protocol.errors import require
from paceline.protocol.handshake import Fingerprint
from paceline.runtime.config import EngineSettings

Tokens = tuple[int, ...]


BlockDraft = FeatureDraft[BlockNetwork]


@dataclass(frozen=True)
class _Filling:
    """A session's block that begins at a position with a token."""

    session: int
    position: int
    token: int


@dataclass(eq=False)
class _BlockSession:
    """`rows`: the last tokens of each row's path. `context`: keys and values of given positions, of all layers."""

    context: SessionFeatures
    rows: RowList[Tokens] = field(default_factory=RowList)
    outputs: dict[_Filling, torch.Tensor] = field(default_factory=dict)  # of each block [size, hidden]


@dataclass(frozen=True, eq=False)
class _Context:
    """The context of one block: keys and values of the given positions before it."""

    rows: torch.Tensor  # [given, layers, 2, kv_heads, head_dim]
    positions: torch.Tensor  # [given]

    def pair(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values, each [kv_heads, given, head_dim]."""
        keys, values = self.rows[:, layer].permute(1, 2, 0, 3)
        return keys, values


class BlockEngine(LedgerEngine[None]):
    """A block drafter as a `FeatureEngine`, which says what its methods promise."""

    def __init__(self, draft: BlockDraft, info: EngineInfo, settings: EngineSettings) -> None:
        super().__init__(info, settings)
        network = self._network = draft.network
        self.need = draft.need
        self._ids = draft.head_ids(info.fingerprint.vocab_size)
        self.feature_width = network.fc.in_features
        self.reach = network.form.tokens
        self._empty = network.norm.weight.new_zeros(network.context_width)
        self._threads = ComputeThreads()
        self._sessions: dict[int, _BlockSession] = {}

    def open(self, session: int, max_rows: int, prefix: Prefix = NO_PREFIX) -> int:
        """As `Engine.open`; begins with no rows, since they cost nothing and features are the session's own."""
        self._ledger.open(session, max_rows)
        self._sessions[session] = _BlockSession(SessionFeatures(self._network.context_width, self._empty))
        return 0

    def close(self, session: int) -> None:  # noqa: D102
        self._ledger.close(session)
        self._sessions.pop(session, None)

    @torch.inference_mode()
    def give(self, session: int, first_position: int, rows: FeatureRows) -> None:  # noqa: D102
        features = check_rows(first_position, rows, self.feature_width, self._empty)
        positions = torch.arange(first_position, first_position + len(rows), device=features.device)
        state = self._sessions[session]
        state.context.put(first_position, self._network.context(features, positions).flatten(1))
        state.outputs.clear()

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> Sequence[Logits]:  # noqa: D102
        self._ledger.check(plan)
        self._threads.bind()
        requests = [self._take(item) for item in plan.items]
        self._ledger.apply(plan)
        outputs = self._outputs_of([block for rows in requests for block, _ in rows if block is not None])
        logits = self._logits([each for rows in requests for each in rows], outputs)
        return np.split(logits, np.cumsum([len(rows) for rows in requests])[:-1])

    def _take(self, item: StepItem) -> list[tuple[_Filling | None, int]]:
        """Add a session's new rows. Returns what block, and which place there, predicts each logit row's next token.

        None: no feature is near enough.
        """
        state = self._sessions[item.session]
        state.rows.keep(item)
        requests: list[tuple[_Filling | None, int]] = []
        for row, (token, depth) in enumerate(zip(item.token_ids, depths(item), strict=True)):
            path = (*(state.rows.parent(item, row) or ()), token)[-self.reach :]
            state.rows.add(path)
            requests.append(self._request_at(item.session, item.trunk + depth - 1, path))
        return [requests[row] for row in item.logit_rows]

    def _request_at(self, session: int, position: int, path: Tokens) -> tuple[_Filling | None, int]:
        last = self._sessions[session].context.nearest(position - 1)
        distance = position - 1 - last
        if last == NOTHING or distance >= self.reach:
            return None, 0
        place = distance + self._network.form.size - self.reach
        return _Filling(session, last + 1, path[-distance - 1]), place

    def _outputs_of(self, blocks: Sequence[_Filling]) -> dict[_Filling, torch.Tensor]:
        """Each block's outputs [size, hidden]; a session keeps those of blocks at its last position."""
        stored_outputs = {block: self._sessions[block.session].outputs.get(block) for block in blocks}
        missing = [block for block, outputs in stored_outputs.items() if outputs is None]
        by_block = {block: outputs for block, outputs in stored_outputs.items() if outputs is not None}
        if missing:
            by_block |= self._fill(missing)
        for block, outputs in by_block.items():
            session_outputs = self._sessions[block.session].outputs
            if session_outputs and next(iter(session_outputs)).position < block.position:
                session_outputs.clear()
            session_outputs[block] = outputs
        return by_block

    def _fill(self, blocks: Sequence[_Filling]) -> dict[_Filling, torch.Tensor]:
        """Fill blocks in one pass."""
        contexts = [self._context(block) for block in blocks]
        device, size = self._empty.device, self._network.form.size
        tokens = torch.tensor([block.token for block in blocks], device=device)
        positions = torch.tensor([block.position for block in blocks], device=device)

        def attend(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            parts: list[torch.Tensor] = []
            for place, context in enumerate(contexts):
                earlier_keys, earlier_values = context.pair(layer)
                own = positions[place] + torch.arange(size, device=device)
                mask = self._network.form.sights[layer].mask(own, torch.cat((context.positions, own)))
                joined_keys = torch.cat((earlier_keys, keys[place]), dim=1)[None]
                joined_values = torch.cat((earlier_values, values[place]), dim=1)[None]
                parts.append(block_attention(queries[place : place + 1], joined_keys, joined_values, mask))
            return torch.cat(parts)

        return dict(zip(blocks, self._network.outputs(tokens, positions, attend), strict=True))

    def _context(self, block: _Filling) -> _Context:
        context = self._sessions[block.session].context
        rows, positions = context.rows_before(block.position)
        shape = (len(self._network.layers), 2, self._network.config.num_key_value_heads, -1)
        return _Context(rows.unflatten(1, shape), positions)

    def _logits(
        self, requests: Sequence[tuple[_Filling | None, int]], outputs: Mapping[_Filling, torch.Tensor]
    ) -> Logits:
        """[rows, V]; zeros for rows without a block, -inf for ids that the head has no logits for."""
        wide = np.zeros((len(requests), self.info.fingerprint.vocab_size), np.float32)
        answers = [(row, block, place) for row, (block, place) in enumerate(requests) if block is not None]
        if not answers:
            return wide
        logits = self._network.logits(torch.stack([outputs[block][place] for _, block, place in answers]))
        rows = np.array([row for row, _, _ in answers])
        wide[rows] = -np.inf
        wide[np.ix_(rows, self._ids)] = logits[:, : len(self._ids)].float().cpu().numpy()
        return wide


def build_block_engine(draft: BlockDraft, tokenizer: Tokenizer, settings: EngineSettings, name: str) -> BlockEngine:
    """Make the engine of a loaded or trained network.

    Raises:
        InvalidInput: its context or its memory doesn't allow the settings.
    """
    network: Any = draft.network
    network.train(False)
    network.requires_grad_(False)
    own = network.config.max_position_embeddings
    most = settings.max_model_len or own
    require(most <= own, "max_model_len", most, f"at most {own}, the draft's context")
    config = network.config
    groups = config.num_attention_heads // config.num_key_value_heads
    layer = LayerShape(config.num_key_value_heads, config.head_dim, config.head_dim, groups)
    shape = KVShape((layer,) * len(network.layers), network.dtype, network.device)
    memory = plan_memory(network, settings, whole_context(shape), most, packs=False)
    fingerprint = Fingerprint(name, tokenizer.fingerprint, tokenizer.vocab_size, numeric_fingerprint(network, most))
    return BlockEngine(draft, EngineInfo(fingerprint, most, memory.kv // memory.row_bytes), settings)
