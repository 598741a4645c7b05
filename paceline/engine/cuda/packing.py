"""From a plan to a shape and its integers. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from paceline.engine.attention import Horizon, visible_keys
from paceline.engine.cuda.buckets import (
    BITS,
    GATHERED_ROWS,
    SessionGroup,
    StepShape,
    candidate_count,
    count_bucket,
    groups_of,
    mask_words,
)
from paceline.engine.cuda.layout import Field, GroupFields, Layout, layout_of
from paceline.engine.cuda.noise import counter_of
from paceline.engine.cuda.pages import Ids, PagePool
from paceline.engine.interface import NO_FILTERS, Ranking, StepItem, StepPlan
from paceline.engine.ledger import depths


@dataclass(frozen=True)
class PackedStep:
    """A shape, its integers, and where each item's logit rows start among the raced or the plain ones."""

    shape: StepShape
    integers: Ids
    starts: tuple[int, ...] = ()
    raced_rows: int = 0
    plain_rows: int = 0
    temperatures: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    """[raced_rows] 0: greedy."""
    filters: NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 3)))
    """[raced_rows, 3]: top_k, top_p, min_p."""
    counts: NDArray[np.intp] = field(default_factory=lambda: np.empty(0, np.intp))
    """[raced_rows]: how many tokens each is asked for."""


def pack(
    plan: StepPlan,
    races: Sequence[Ranking | None],
    pool: PagePool,
    vocab_size: int,
    horizons: Sequence[Horizon | None] = (None,),
    feature_layers: Collection[int] = (),
    gathered_rows: int = GATHERED_ROWS,
) -> PackedStep:
    """Lay a checked plan out.

    Args:
        plan: whose sessions hold pages in `pool`.
        races: for each item how its logit rows are raced; None: their logits are returned.
        pool: where rows are.
        vocab_size: bounds the candidates of a row.
        horizons: how far back rows see, by kind of layer.
        feature_layers: layers whose hidden states are returned.
        gathered_rows: as for `groups_of`.
    """
    items = plan.items
    groups = groups_of(items, gathered_rows)
    rows = _rows_of_items(items, pool)
    raced_rows, plain_rows, starts = _logit_rows(items, races, rows.lows.tolist())
    most_tokens = max((race.count for race in races if race is not None), default=0)
    shape = StepShape(
        rows=count_bucket(plan.rows),
        groups=tuple(group.shape for group in groups),
        raced_rows=count_bucket(len(raced_rows)),
        plain_rows=count_bucket(len(plain_rows)),
        candidates=candidate_count(most_tokens, vocab_size) if raced_rows else 0,
        kinds=len(horizons),
        feature_layers=tuple(sorted(feature_layers)),
        has_filters=any(race is not None and race.filters != NO_FILTERS for race in races),
    )
    layout, integers = layout_of(shape), _blank_integers(shape, pool)
    _put(integers, layout.logit_rows, raced_rows)
    _put(integers, Field(layout.logit_rows.start + shape.raced_rows, (shape.plain_rows,)), plain_rows)
    _put(integers, layout.token_ids, list(chain.from_iterable(item.token_ids for item in items)))
    _put(integers, layout.positions, rows.positions)
    _put(integers, layout.write, rows.write)
    temperatures, filters, counts = _put_races(integers, races, layout)
    query = _view(integers, layout.query)
    first_query = 0
    for group, fields in zip(groups, layout.groups, strict=True):
        group_rows = _rows_of_group(group, rows)
        _put_group(integers, group_rows, fields, rows, pool)
        _put_visible(integers, group_rows, fields, items, rows, horizons)
        query[group_rows.packed] = first_query + np.flatnonzero(group_rows.new)
        first_query += group.shape.queries
    return PackedStep(shape, integers, starts, len(raced_rows), len(plain_rows), temperatures, filters, counts)


def blank_step(shape: StepShape, pool: PagePool) -> PackedStep:
    """A step of no sessions, which is padding alone."""
    return PackedStep(shape, _blank_integers(shape, pool))


def _blank_integers(shape: StepShape, pool: PagePool) -> Ids:
    """Padding is token 0 at position 0, written to the scratch row; its queries see row 0 of nobody's page."""
    layout = layout_of(shape)
    integers = np.zeros(layout.size, np.int64)
    _view(integers, layout.write)[:] = pool.scratch_row
    for fields in layout.groups:
        _view(integers, fields.pages)[:] = pool.pages
        _view(integers, fields.end)[:] = 1
    return integers


@dataclass(frozen=True, eq=False)
class _ItemRows:
    """New rows of a step's items, one after another; by item, or by row where it says so."""

    slots: Ids
    counts: Ids
    lows: Ids
    """The packed row that each begins with."""
    bases: Ids
    trunks: Ids
    positions: Ids  # [rows]
    write: Ids  # [rows] of the pool


def _rows_of_items(items: Sequence[StepItem], pool: PagePool) -> _ItemRows:
    counts = np.array([len(item.token_ids) for item in items])
    bases = np.array([item.base_length for item in items])
    slots = pool.slots_of([item.session for item in items])
    lows = counts.cumsum() - counts
    kv_rows = np.arange(counts.sum()) + np.repeat(bases - lows, counts)
    positions = kv_rows.copy()
    for item, low in zip(items, lows.tolist(), strict=True):
        if not item.is_chain:
            positions[low : low + len(item.token_ids)] = np.array(depths(item)) + (item.trunk - 1)
    write = pool.rows_of(np.repeat(slots, counts), kv_rows)
    return _ItemRows(slots, counts, lows, bases, np.array([item.trunk for item in items]), positions, write)


def _logit_rows(
    items: Sequence[StepItem], races: Sequence[Ranking | None], lows: Sequence[int]
) -> tuple[list[int], list[int], tuple[int, ...]]:
    """Packed rows that are raced, packed rows whose logits are returned, and where each item's start among them."""
    raced_rows: list[int] = []
    plain_rows: list[int] = []
    starts = []
    for item, race, low in zip(items, races, lows, strict=False):
        kind = plain_rows if race is None else raced_rows
        starts.append(len(kind))
        kind.extend(low + row for row in item.logit_rows)
    return raced_rows, plain_rows, tuple(starts)


def _put(integers: Ids, field: Field, values: Sequence[int] | NDArray[np.int64]) -> None:
    integers[field.start : field.start + len(values)] = values


def _view(integers: Ids, field: Field) -> Ids:
    return integers[field.start : field.end].reshape(field.shape)


def _put_races(
    integers: Ids, races: Sequence[Ranking | None], layout: Layout
) -> tuple[NDArray[np.float32], NDArray[np.float64], NDArray[np.intp]]:
    """Enter how rows are raced; returns temperatures, filters [raced rows, 3] and counts, a row each."""
    rankings = [race for race in races if race is not None]
    counters = [counter_of(race.noise, position) for race in rankings for position in race.positions]
    # Words of the key need 32 bits of the 64, so signs don't matter.
    if counters:
        _view(integers, layout.counters)[: len(counters)] = counters
    temperatures = np.array([race.temperature for race in rankings for _ in race.positions], np.float32)
    _put(integers, layout.temperatures, temperatures.view(np.int32).astype(np.int64))
    rows = [race.filters for race in rankings for _ in race.positions]
    filters = np.array([(row.top_k, row.top_p, row.min_p) for row in rows], np.float64).reshape(-1, 3)
    _put(integers, layout.top_k, filters[:, 0].astype(np.int64))
    counts = np.array([race.count for race in rankings for _ in race.positions], np.intp)
    return temperatures, filters, counts


@dataclass(frozen=True, eq=False)
class _GroupRows:
    """A group's items, their new rows among its queries, and the packed row of each of these."""

    members: Ids
    new: NDArray[np.bool_]  # [items, rows]
    packed: Ids


def _rows_of_group(group: SessionGroup, rows: _ItemRows) -> _GroupRows:
    members, columns = np.array(group.items), np.arange(group.shape.rows)
    new = columns < rows.counts[members][:, None]
    return _GroupRows(members, new, (rows.lows[members][:, None] + columns)[new])


def _put_group(integers: Ids, group: _GroupRows, fields: GroupFields, rows: _ItemRows, pool: PagePool) -> None:
    members, count = group.members, len(group.members)
    source, pages = _view(integers, fields.source), _view(integers, fields.pages)
    source.reshape(len(pages), -1)[:count][group.new] = group.packed
    own_pages = pool.pages_of(rows.slots[members], pages.shape[1])
    pages[:count, : own_pages.shape[1]] = own_pages
    _put(integers, fields.length, rows.bases[members] + rows.counts[members])
    _put(integers, fields.trunk, rows.trunks[members])


def _put_visible(
    integers: Ids,
    group: _GroupRows,
    fields: GroupFields,
    items: Sequence[StepItem],
    rows: _ItemRows,
    horizons: Sequence[Horizon | None],
) -> None:
    """Enter the keys that each query sees: of a chain all up to its own, of a tree the trunk and its ancestors."""
    first, end, bits = (_view(integers, field) for field in (fields.first, fields.end, fields.bits))
    members, count = group.members, len(group.members)
    ends = rows.bases[members][:, None] + np.arange(1, end.shape[1] + 1)
    trees = [(place, items[index]) for place, index in enumerate(members.tolist()) if not items[index].is_chain]
    for place, item in trees:
        ends[place] = item.trunk
    end[:count][group.new] = ends[group.new]
    for kind, horizon in enumerate(horizons):
        if horizon is not None:
            first[kind, :count][group.new] = horizon[rows.positions[group.packed]]
        for place, item in trees:
            tree_bits = _tree_bits(item, horizon)
            bits[kind, place, : len(item.token_ids), : tree_bits.shape[1]] = tree_bits


def _tree_bits(item: StepItem, horizon: Horizon | None) -> Ids:
    """[new rows, words]: which rows of the tree each new row sees, 64 to a word, the first in the lowest bit."""
    visible = np.zeros((len(item.token_ids), mask_words(item) * BITS), np.bool_)
    visible[:, : item.tree_rows] = visible_keys(item, horizon, item.trunk)
    return np.packbits(visible, axis=1, bitorder="little").view("<i8").astype(np.int64, copy=False)
