"""Block drafting behind the engine interface.

No row holds keys or values of its own: what a block's rows attend to is the context, the target's features of the
tokens before it. A row asks what follows it. The block that can tell begins behind the last given feature before the
row, with the token of the row's path that stands there; it is computed in one pass when a row first asks, for all
sessions of a step at once, and told to the session's later rows. Tokens behind the block's first change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.drafters.heads.block_network import BlockNetwork, attended
from paceline.drafters.heads.given import NOTHING, GivenFeatures, checked_rows
from paceline.drafters.heads.paths import RowList
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
from paceline.protocol.features import FeatureNeed
from paceline.protocol.handshake import Fingerprint
from paceline.runtime.config import EngineSettings

Tokens = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class BlockDraft:
    """A network as it was loaded or trained, and what belongs to it.

    Attributes:
        need: the target's hidden states that it reads, in the order in which it joins them.
        target_ids: [head size] target id of each of its own, ascending; None: they are the target's.
    """

    network: BlockNetwork
    need: FeatureNeed
    target_ids: NDArray[np.int32] | None = None


@dataclass(frozen=True)
class _Filling:
    """A session's block that begins at a position with a token."""

    session: int
    position: int
    token: int


@dataclass(eq=False)
class _BlockSession:
    """`rows`: the last tokens of each row's path. `context`: keys and values of given positions. `told`: blocks."""

    context: GivenFeatures
    rows: RowList[Tokens] = field(default_factory=RowList)
    told: dict[_Filling, torch.Tensor] = field(default_factory=dict)  # each [size, hidden]


@dataclass(frozen=True, eq=False)
class _Context:
    """What one block attends to before itself: keys and values of the positions given."""

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
        # Of a padded vocabulary a head may have logits of ids that no token has: its last ones, since they ascend.
        ids = np.arange(info.fingerprint.vocab_size) if draft.target_ids is None else draft.target_ids
        self._ids = ids[ids < info.fingerprint.vocab_size]
        self.feature_width = network.fc.in_features
        self.reach = network.form.tokens
        self._empty = network.norm.weight.new_zeros(network.context_width)
        self._threads = ComputeThreads()
        self._sessions: dict[int, _BlockSession] = {}

    def open(self, session: int, max_rows: int, prefix: Prefix = NO_PREFIX) -> int:
        """As `Engine.open`; begins with no rows: they cost nothing, and features are the session's own."""
        self._ledger.open(session, max_rows)
        self._sessions[session] = _BlockSession(GivenFeatures(self._network.context_width, self._empty))
        return 0

    def close(self, session: int) -> None:  # noqa: D102
        self._ledger.close(session)
        self._sessions.pop(session, None)

    @torch.inference_mode()
    def give(self, session: int, first_position: int, rows: FeatureRows) -> None:  # noqa: D102
        taken = checked_rows(first_position, rows, self.feature_width, self._empty)
        positions = torch.arange(first_position, first_position + len(rows), device=taken.device)
        held = self._sessions[session]
        held.context.put(first_position, self._network.context(taken, positions).flatten(1))
        held.told.clear()

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> Sequence[Logits]:  # noqa: D102
        self._ledger.check(plan)
        self._threads.bind()
        asked = [self._take(item) for item in plan.items]
        self._ledger.apply(plan)
        told = self._tell([block for wants in asked for block, _ in wants if block is not None])
        logits = self._logits([each for wants in asked for each in wants], told)
        return np.split(logits, np.cumsum([len(wants) for wants in asked])[:-1])

    def _take(self, item: StepItem) -> list[tuple[_Filling | None, int]]:
        """Take a session's rows in; for those whose logits are wanted, the block that tells and at which place.

        None: nothing can be known.
        """
        held = self._sessions[item.session]
        held.rows.keep(item)
        found: list[tuple[_Filling | None, int]] = []
        for row, (token, depth) in enumerate(zip(item.token_ids, depths(item), strict=True)):
            path = (*(held.rows.parent(item, row) or ()), token)[-self.reach :]
            held.rows.add(path)
            found.append(self._asked(item.session, item.trunk + depth - 1, path))
        return [found[row] for row in item.logit_rows]

    def _asked(self, session: int, position: int, path: Tokens) -> tuple[_Filling | None, int]:
        last = self._sessions[session].context.nearest(position - 1)
        behind = position - 1 - last
        if last == NOTHING or behind >= self.reach:
            return None, 0
        place = behind + self._network.form.size - self.reach
        return _Filling(session, last + 1, path[-behind - 1]), place

    def _tell(self, wanted: Sequence[_Filling]) -> dict[_Filling, torch.Tensor]:
        """Each block's outputs [size, hidden]; a session remembers those of its last position alone."""
        found = {block: self._sessions[block.session].told.get(block) for block in wanted}
        missing = [block for block, outputs in found.items() if outputs is None]
        told = {block: outputs for block, outputs in found.items() if outputs is not None}
        if missing:
            told |= self._filled(missing)
        for block, outputs in told.items():
            remembered = self._sessions[block.session].told
            if remembered and next(iter(remembered)).position < block.position:
                remembered.clear()
            remembered[block] = outputs
        return told

    def _filled(self, blocks: Sequence[_Filling]) -> dict[_Filling, torch.Tensor]:
        """Run one pass that fills blocks."""
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
                parts.append(attended(queries[place : place + 1], joined_keys, joined_values, mask))
            return torch.cat(parts)

        return dict(zip(blocks, self._network.outputs(tokens, positions, attend), strict=True))

    def _context(self, block: _Filling) -> _Context:
        given = self._sessions[block.session].context
        rows, positions = given.before(block.position)
        shape = (len(self._network.layers), 2, self._network.config.num_key_value_heads, -1)
        return _Context(rows.unflatten(1, shape), positions)

    def _logits(self, asked: Sequence[tuple[_Filling | None, int]], told: Mapping[_Filling, torch.Tensor]) -> Logits:
        """[rows, V]; zeros where nothing is known, -inf for ids that the head has no logits for."""
        wide = np.zeros((len(asked), self.info.fingerprint.vocab_size), np.float32)
        known = [(row, block, place) for row, (block, place) in enumerate(asked) if block is not None]
        if not known:
            return wide
        logits = self._network.logits(torch.stack([told[block][place] for _, block, place in known]))
        rows = np.array([row for row, _, _ in known])
        wide[rows] = -np.inf
        wide[np.ix_(rows, self._ids)] = logits[:, : len(self._ids)].float().cpu().numpy()
        return wide


def build_block_engine(draft: BlockDraft, tokenizer: Tokenizer, settings: EngineSettings, name: str) -> BlockEngine:
    """Make ready to serve what was loaded or trained.

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
