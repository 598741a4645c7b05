"""The engine of reproducible mode: logits are bit-identical whatever runs beside a session, and however it got there.

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

from paceline.engine.forward import AttentionCall, packed_forward
from paceline.engine.interface import NO_PREFIX, Logits, Prefix, StepItem, StepPlan
from paceline.engine.kv import SessionKV
from paceline.engine.ledger import depths
from paceline.engine.reproducible.shapes import (
    TILE_ROWS,
    Pass,
    Placed,
    bucket,
    by_bucket,
    chained,
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
    mask: torch.Tensor  # [tiles, 1, groups · TILE_ROWS, length] additive

    @property
    def tiles(self) -> int:
        return self.mask.shape[0]


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

    def write(self, layer: int, new: torch.Tensor) -> None:
        """Put the keys and values of the pass, [2, kv_heads, rows, head_dim], where they belong."""
        end = self.first + self.rows.stop - self.rows.start
        self.kv.keys_and_values(layer)[:, :, self.first : end] = new[:, :, self.rows]

    def turns(self, layer: int) -> Iterator[tuple[torch.Tensor, tuple[_BucketGroup, ...]]]:
        """The session's keys and values as they must be for each turn's groups."""
        yield self.kv.keys_and_values(layer), self.groups


@dataclass(frozen=True)
class _Tree:
    """Rows of a pass that branch. `keys` holds those of all the tree's rows through all passes of the step."""

    kv: SessionKV
    rows: slice
    start: int
    keys: torch.Tensor  # [layers, 2, kv_heads, tree rows, head_dim]
    branches: tuple[_PaddedBranch, ...]

    def write(self, layer: int, new: torch.Tensor) -> None:
        """Put the keys and values of the pass, [2, kv_heads, rows, head_dim], where they belong."""
        end = self.start + self.rows.stop - self.rows.start
        self.keys[layer][:, :, self.start : end] = new[:, :, self.rows]

    def turns(self, layer: int) -> Iterator[tuple[torch.Tensor, tuple[_BucketGroup, ...]]]:
        """The session's keys and values as they must be for each turn's groups."""
        held = self.kv.keys_and_values(layer)
        for branch in self.branches:
            slots = slice(branch.first, branch.first + len(branch.path))
            held[:, :, slots] = self.keys[layer][:, :, branch.path]
            yield held, branch.groups


@dataclass(frozen=True)
class _PassAttention:
    """Attention of one pass, part by part; padded rows get zeros."""

    parts: tuple[_Chain | _Tree, ...]

    def attend(self, call: AttentionCall) -> torch.Tensor:
        query = call.query[0]  # [heads, rows, head_dim]
        new = torch.stack((call.key[0], call.value[0]))  # [2, kv_heads, rows, head_dim]
        attended = torch.zeros_like(query)
        for part in self.parts:
            part.write(call.layer, new)
            for held, groups in part.turns(call.layer):
                for group in groups:
                    attended[:, group.rows] = _attend_tiles(group, query, held, call.scaling)
        return attended.transpose(0, 1)[None]


def _attend_tiles(
    group: _BucketGroup, query: torch.Tensor, held: torch.Tensor, scaling: float | None
) -> torch.Tensor:  # [heads, count, head_dim]
    """Attention in tiles of one shape.

    The heads that share keys lie one after another in a tile, eight rows each:
    the kernel's buffers then start at multiples of 64 bytes on every thread,
    which its sums depend on.
    """
    heads, head_dim = query.shape[0], query.shape[2]
    kv_heads, tiles = held.shape[1], group.tiles
    groups = heads // kv_heads
    padded = query.new_zeros((heads, tiles * TILE_ROWS, head_dim))
    padded[:, group.offset : group.offset + group.count] = query[:, group.rows]
    tiled = padded.view(kv_heads, groups, tiles, TILE_ROWS, head_dim).permute(2, 0, 1, 3, 4)
    packed = tiled.reshape(tiles, kv_heads, groups * TILE_ROWS, head_dim)
    keys, values = held[:, None, :, : group.length].expand(-1, tiles, -1, -1, -1)
    found = functional.scaled_dot_product_attention(packed, keys, values, attn_mask=group.mask, scale=scaling)
    rows = found.view(tiles, kv_heads, groups, TILE_ROWS, head_dim).permute(1, 2, 0, 3, 4)
    return rows.reshape(heads, tiles * TILE_ROWS, head_dim)[:, group.offset : group.offset + group.count]


class ReproducibleEngine(TransformerEngine):
    """A decoder whose logits are, bit for bit, a function of a session's own tokens."""

    def __init__(self, decoder: ServedDecoder) -> None:
        super().__init__(decoder)
        self._prompt_rows: dict[int, int] = {}
        self._decode_rows = decoder.settings.reproducible_rows

    def open(self, session: int, max_rows: int, prefix: Prefix = NO_PREFIX) -> int:  # noqa: D102
        reused = super().open(session, bucket(max_rows), prefix)
        self._prompt_rows[session] = prefix.prompt_rows
        return reused

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
        found: dict[tuple[int, int], Logits] = {}
        for made in passes(plan, self._prompt_rows, self._decode_rows):
            logits = self._on_host(self._forward(made, trees))
            for placed in made.placed:
                for row in _wanted(placed):
                    found[placed.item.session, row] = logits[placed.at + row - placed.start]
        for item in plan.items:
            tree = trees[item.session]
            if tree is not None:
                self._kv[item.session].copy_in(item.base_length + chained(item), tree)
        none = np.empty((0, self.info.fingerprint.vocab_size), np.float32)
        wanted = [[found[item.session, row] for row in item.logit_rows] for item in plan.items]
        return [np.stack(rows) if rows else none for rows in wanted]

    def _prepare(self, item: StepItem) -> torch.Tensor | None:
        """Move kept rows, make every key that the step reads finite, and make room for a tree's rows."""
        kv, shape, count = self._kv[item.session], self._kv_shape, len(item.token_ids)
        kv.keep(item.base_length, item.kept_rows)
        kv.fill(bucket(item.base_length + count))
        rows = count - chained(item)
        size = (shape.layers, 2, shape.kv_heads, rows, shape.head_dim)
        return torch.empty(size, dtype=shape.dtype, device=shape.device) if rows else None

    def _forward(self, made: Pass, trees: dict[int, torch.Tensor | None]) -> torch.Tensor:
        tokens, positions = [0] * made.rows, [0] * made.rows
        for placed in made.placed:
            at = slice(placed.at, placed.at + placed.end - placed.start)
            tokens[at] = placed.item.token_ids[placed.start : placed.end]
            positions[at] = [placed.item.base_length + depth - 1 for depth in depths(placed.item)][
                placed.start : placed.end
            ]
        wanted = [*range(made.rows)] if any(_wanted(placed) for placed in made.placed) else [0]
        parts = tuple(
            part for placed in made.placed for part in self._parts(placed, positions, trees[placed.item.session])
        )
        return packed_forward(self._model, _PassAttention(parts), tokens, positions, wanted)

    def _parts(self, placed: Placed, positions: Sequence[int], tree: torch.Tensor | None) -> Iterator[_Chain | _Tree]:
        item, kv = placed.item, self._kv[placed.item.session]
        root, end = chained(item), placed.at + placed.end - placed.start
        middle = min(max(root, placed.start), placed.end)
        turn = placed.at + middle - placed.start
        if turn > placed.at:
            # A prompt's rows keep their index in a tile, as they keep their index in a pass.
            groups = self._groups([*range(placed.at, turn)], positions, placed.at % TILE_ROWS)
            yield _Chain(kv, slice(placed.at, turn), item.base_length + placed.start, groups)
        if turn < end:
            assert tree is not None, "made for every item that branches"
            yield _Tree(kv, slice(turn, end), middle - root, tree, self._branches(placed, middle, positions))

    def _branches(self, placed: Placed, start: int, positions: Sequence[int]) -> tuple[_PaddedBranch, ...]:
        item = placed.item
        root, shift = chained(item), placed.at - placed.start
        device = self._kv_shape.device
        return tuple(
            _PaddedBranch(
                torch.tensor([row - root for row in path], device=device),
                item.base_length + root,
                self._groups([row + shift for row in rows], positions, 0),
            )
            for path, rows in tree_paths(item, start, placed.end)
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
            groups.append(
                _BucketGroup(where, end - start, shift, length, self._tile_mask(own[start:end], shift, length))
            )
        return tuple(groups)

    def _tile_mask(self, positions: Sequence[int], offset: int, length: int) -> torch.Tensor:
        """Additive mask [tiles, 1, groups · TILE_ROWS, length]: a row sees keys up to its position, padding all."""
        shape = self._kv_shape
        tiles = -(-(offset + len(positions)) // TILE_ROWS)
        last = torch.full((tiles * TILE_ROWS, 1), length)
        last[offset : offset + len(positions), 0] = torch.tensor(positions)
        mask = torch.zeros((tiles * TILE_ROWS, length), dtype=shape.dtype)
        mask.masked_fill_(torch.arange(length) > last, float("-inf"))
        return mask.to(shape.device).view(tiles, 1, TILE_ROWS, length).repeat(1, 1, shape.groups, 1)


def _wanted(placed: Placed) -> list[int]:
    """Rows of the item that are in the pass and whose logits are wanted."""
    return [row for row in placed.item.logit_rows if placed.start <= row < placed.end]
