"""The engine of reproducible mode: logits are bit-identical whatever else runs, and however a text is cut.

Every pass has one of two shapes (`paceline.engine.reproducible.shapes`). Attention runs
session by session in tiles of eight queries, over the bucket of their position,
with the keys of a row's own path in the slots of their positions: a tree's
branches take turns in the slots behind the trunk. Padded and masked keys are
finite, so they add exact zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from paceline.engine.attention import Horizon
from paceline.engine.forward import AttentionCall
from paceline.engine.hidden_states import States
from paceline.engine.interface import NO_PREFIX, Logits, Prefix, StepItem, StepPlan
from paceline.engine.kv import SessionKV
from paceline.engine.ledger import depths
from paceline.engine.reproducible.shapes import (
    TILE_ROWS,
    Pass,
    RowPlacement,
    bucket,
    by_bucket,
    chain_rows,
    passes,
    tree_paths,
)
from paceline.engine.transformer import ServedDecoder, TransformerEngine
from paceline.protocol.errors import InvalidInput

Rows = slice | torch.Tensor
"""Rows of a pass: a range where they follow one another."""


@dataclass(frozen=True)
class _BucketGroup:
    """Rows of a pass that attend over a session's first `length` keys; the first stands at `offset` in its tile."""

    rows: Rows
    count: int
    offset: int
    length: int
    masks: tuple[torch.Tensor, ...]  # by kind of layer [tiles, 1, groups · TILE_ROWS, length] additive

    @property
    def tiles(self) -> int:
        return self.masks[0].shape[0]


@dataclass(frozen=True)
class _PaddedBranch:
    """A path of a tree: its keys take the slots [first, first + len(path)) while its groups attend."""

    path: torch.Tensor
    first: int
    groups: tuple[_BucketGroup, ...]


@dataclass(frozen=True)
class _Chain:
    """Rows of a pass whose keys take the slots from `first` on and stay there."""

    kv: SessionKV
    rows: slice
    first: int
    groups: tuple[_BucketGroup, ...]

    def write(self, call: AttentionCall) -> None:
        """Write the keys and values of the pass to their slots."""
        _write(call, self.rows, self.kv, self.first)

    def turns(self, layer: int) -> Iterator[tuple[_BucketGroup, ...]]:
        """The groups of each turn; until the next one, the session's slots hold their keys and values."""
        yield self.groups


@dataclass(frozen=True)
class _Tree:
    """Rows of a pass that branch. `tree` holds the keys and values of all the tree's rows during the whole step."""

    kv: SessionKV
    rows: slice
    start: int
    tree: SessionKV
    branches: tuple[_PaddedBranch, ...]

    def write(self, call: AttentionCall) -> None:
        """Write the keys and values of the pass to their slots."""
        _write(call, self.rows, self.tree, self.start)

    def turns(self, layer: int) -> Iterator[tuple[_BucketGroup, ...]]:
        """The groups of each turn; until the next one, the session's slots hold their keys and values."""
        for branch in self.branches:
            slots = slice(branch.first, branch.first + len(branch.path))
            self.kv.keys(layer)[:, slots] = self.tree.keys(layer)[:, branch.path]
            self.kv.values(layer)[:, slots] = self.tree.values(layer)[:, branch.path]
            yield branch.groups


def _write(call: AttentionCall, rows: slice, kv: SessionKV, first: int) -> None:
    """Write the keys and values of some rows of a pass to the slots from `first` on."""
    slots = slice(first, first + rows.stop - rows.start)
    kv.keys(call.layer)[:, slots] = call.key[0, :, rows]
    kv.values(call.layer)[:, slots] = call.value[0, :, rows]


@dataclass(frozen=True)
class _PassAttention:
    """Attention of one pass, part by part; padded rows get zeros."""

    parts: tuple[_Chain | _Tree, ...]
    kind_of_layer: tuple[int, ...]

    def attend(self, call: AttentionCall) -> torch.Tensor:
        query = call.query[0]  # [heads, rows, head_dim]
        output = torch.zeros_like(query)
        for part in self.parts:
            part.write(call)
            keys, values = part.kv.keys(call.layer), part.kv.values(call.layer)
            for groups in part.turns(call.layer):
                for group in groups:
                    mask = group.masks[self.kind_of_layer[call.layer]]
                    output[:, group.rows] = _attend_tiles(group, mask, query, (keys, values), call.scaling)
        return output.transpose(0, 1)[None]


def _attend_tiles(
    group: _BucketGroup,
    mask: torch.Tensor,
    query: torch.Tensor,
    keys_values: tuple[torch.Tensor, torch.Tensor],
    scaling: float | None,
) -> torch.Tensor:  # [heads, count, head_dim]
    """Attention in tiles of one shape.

    The heads that share keys lie one after another in a tile, eight rows each:
    the kernel's buffers then start at multiples of 64 bytes on every thread,
    which its sums depend on.
    """
    heads, head_dim = query.shape[0], query.shape[2]
    kv_heads, tiles = keys_values[0].shape[0], group.tiles
    groups = heads // kv_heads
    padded_query = query.new_zeros((heads, tiles * TILE_ROWS, head_dim))
    padded_query[:, group.offset : group.offset + group.count] = query[:, group.rows]
    query_tiles = padded_query.view(kv_heads, groups, tiles, TILE_ROWS, head_dim).permute(2, 0, 1, 3, 4)
    packed_tiles = query_tiles.reshape(tiles, kv_heads, groups * TILE_ROWS, head_dim)
    keys, values = (part[None, :, : group.length].expand(tiles, -1, -1, -1) for part in keys_values)
    attention = functional.scaled_dot_product_attention(packed_tiles, keys, values, attn_mask=mask, scale=scaling)
    rows = attention.view(tiles, kv_heads, groups, TILE_ROWS, head_dim).permute(1, 2, 0, 3, 4)
    return rows.reshape(heads, tiles * TILE_ROWS, head_dim)[:, group.offset : group.offset + group.count]


class ReproducibleEngine(TransformerEngine):
    """A decoder whose logits are, bit for bit, a function of a session's own tokens."""

    def __init__(self, decoder: ServedDecoder) -> None:
        super().__init__(decoder)
        self._prompt_rows: dict[int, int] = {}
        self._decode_rows = decoder.settings.reproducible_rows

    def open(self, session: int, max_rows: int, prefix: Prefix = NO_PREFIX) -> int:  # noqa: D102
        cached_rows = super().open(session, bucket(max_rows), prefix)
        self._prompt_rows[session] = prefix.prompt_rows
        return cached_rows

    def close(self, session: int) -> None:  # noqa: D102
        super().close(session)
        self._prompt_rows.pop(session, None)

    def _run(self, plan: StepPlan) -> Sequence[Logits]:
        for item in plan.items:
            if item.kept_tree:
                name = f"session {item.session} trunk_length"
                raise InvalidInput.of(name, item.trunk, f"{item.base_length} in reproducible mode: no kept trees")
        trees = {item.session: self._prepare(item) for item in plan.items}
        self._ledger.apply(plan)
        row_logits: dict[tuple[int, int], Logits] = {}
        layers = self._states.begin(plan)
        for pass_ in passes(plan, self._prompt_rows, self._decode_rows):
            pass_logits, states = self._run_pass(pass_, trees, layers)
            logits = self._on_host(pass_logits)
            for placement in pass_.placements:
                if states:
                    rows = slice(placement.pass_row, placement.pass_row + placement.end - placement.start)
                    self._states.take(placement.item.session, placement.start, states, rows)
                for row in _logit_rows(placement):
                    row_logits[placement.item.session, row] = logits[placement.pass_row + row - placement.start]
        for item in plan.items:
            tree = trees[item.session]
            if tree is not None:
                branches = tree.copy_out(0, tree.capacity)
                self._kv[item.session].copy_in(item.base_length + chain_rows(item), branches)
        none = np.empty((0, self.info.fingerprint.vocab_size), np.float32)
        outputs = [[row_logits[item.session, row] for row in item.logit_rows] for item in plan.items]
        return [np.stack(rows) if rows else none for rows in outputs]

    def _prepare(self, item: StepItem) -> SessionKV | None:
        """Move kept rows, make every key that the step reads finite, and make room for a tree's rows."""
        kv, count = self._kv[item.session], len(item.token_ids)
        kv.keep(item.base_length, item.kept_rows)
        kv.fill(bucket(item.base_length + count))
        rows = count - chain_rows(item)
        return SessionKV(self._kv_shape, rows) if rows else None

    def _run_pass(
        self, pass_: Pass, trees: dict[int, SessionKV | None], layers: frozenset[int]
    ) -> tuple[torch.Tensor, States]:
        tokens, positions = [0] * pass_.rows, [0] * pass_.rows
        for placement in pass_.placements:
            rows = slice(placement.pass_row, placement.pass_row + placement.end - placement.start)
            tokens[rows] = placement.item.token_ids[placement.start : placement.end]
            positions[rows] = [placement.item.base_length + depth - 1 for depth in depths(placement.item)][
                placement.start : placement.end
            ]
        logit_rows = [*range(pass_.rows)] if any(_logit_rows(placement) for placement in pass_.placements) else [0]
        parts = tuple(
            part
            for placement in pass_.placements
            for part in self._parts(placement, positions, trees[placement.item.session])
        )
        attender = _PassAttention(parts, self.attention.kind_of_layer)
        return self._forward_with_states(attender, tokens, positions, logit_rows, layers)

    def _parts(
        self, placement: RowPlacement, positions: Sequence[int], tree: SessionKV | None
    ) -> Iterator[_Chain | _Tree]:
        item, kv = placement.item, self._kv[placement.item.session]
        root, end = chain_rows(item), placement.pass_row + placement.end - placement.start
        middle = min(max(root, placement.start), placement.end)
        turn = placement.pass_row + middle - placement.start
        if turn > placement.pass_row:
            # A prompt's rows keep their index in a tile, as they keep their index in a pass.
            groups = self._groups([*range(placement.pass_row, turn)], positions, placement.pass_row % TILE_ROWS)
            yield _Chain(kv, slice(placement.pass_row, turn), item.base_length + placement.start, groups)
        if turn < end:
            assert tree is not None, "every item that branches has one"
            yield _Tree(kv, slice(turn, end), middle - root, tree, self._branches(placement, middle, positions))

    def _branches(self, placement: RowPlacement, start: int, positions: Sequence[int]) -> tuple[_PaddedBranch, ...]:
        item = placement.item
        root, shift = chain_rows(item), placement.pass_row - placement.start
        device = self._kv_shape.device
        return tuple(
            _PaddedBranch(
                torch.tensor([row - root for row in path], device=device),
                item.base_length + root,
                self._groups([row + shift for row in rows], positions, 0),
            )
            for path, rows in tree_paths(item, start, placement.end)
        )

    def _groups(self, rows: Sequence[int], positions: Sequence[int], offset: int) -> tuple[_BucketGroup, ...]:
        """Groups of rows of a pass, on one path, by bucket."""
        own = [positions[row] for row in rows]
        groups = []
        for start, end in by_bucket(own):
            where: Rows = torch.tensor(rows[start:end], device=self._kv_shape.device)
            if rows[end - 1] - rows[start] == end - 1 - start:
                where = slice(rows[start], rows[end - 1] + 1)
            shift = (offset + start) % TILE_ROWS
            length = bucket(own[start] + 1)
            masks = tuple(
                self._tile_mask(own[start:end], shift, length, kind.horizon) for kind in self.attention.kinds
            )
            groups.append(_BucketGroup(where, end - start, shift, length, masks))
        return tuple(groups)

    def _tile_mask(self, positions: Sequence[int], offset: int, length: int, horizon: Horizon | None) -> torch.Tensor:
        """Additive mask [tiles, 1, groups · TILE_ROWS, length]: from a row's horizon to its position; padding all."""
        shape = self._kv_shape
        tiles = -(-(offset + len(positions)) // TILE_ROWS)
        own = slice(offset, offset + len(positions))
        first, last = torch.full((tiles * TILE_ROWS, 1), 0), torch.full((tiles * TILE_ROWS, 1), length)
        last[own, 0] = torch.tensor(positions)
        if horizon is not None:
            first[own, 0] = torch.from_numpy(horizon[list(positions)])
        slots = torch.arange(length)
        mask = torch.zeros((tiles * TILE_ROWS, length), dtype=shape.dtype)
        mask.masked_fill_((slots < first) | (slots > last), float("-inf"))
        return mask.to(shape.device).view(tiles, 1, TILE_ROWS, length).repeat(1, 1, shape.groups, 1)


def _logit_rows(placement: RowPlacement) -> list[int]:
    """The item's logit rows that are in the pass."""
    return [row for row in placement.item.logit_rows if placement.start <= row < placement.end]
