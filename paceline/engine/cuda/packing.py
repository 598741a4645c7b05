"""From a plan to a shape and its integers. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.engine.attention import Horizon, visible_keys
from paceline.engine.cuda.buckets import (
    BITS,
    LEAST_CANDIDATES,
    SessionGroup,
    StepShape,
    count_bucket,
    groups_of,
    mask_words,
)
from paceline.engine.cuda.layout import Field, GroupFields, Layout, layout_of
from paceline.engine.cuda.noise import counter_of
from paceline.engine.cuda.pages import Ids, PagePool
from paceline.engine.interface import Ranking, StepItem, StepPlan
from paceline.engine.ledger import depths, key_positions


@dataclass(frozen=True)
class PackedStep:
    """A shape, its integers, and where each item's logit rows start among the raced or the plain ones."""

    shape: StepShape
    integers: Ids
    starts: tuple[int, ...]
    raced_rows: int
    plain_rows: int


def pack(
    plan: StepPlan,
    races: Sequence[Ranking | None],
    pool: PagePool,
    vocab_size: int,
    horizons: Sequence[Horizon | None] = (None,),
    feature_layers: Collection[int] = (),
) -> PackedStep:
    """Lay a checked plan out.

    Args:
        plan: whose sessions hold pages in `pool`.
        races: for each item how its logit rows are raced; None: their logits are returned.
        pool: where rows are.
        vocab_size: bounds the candidates of a row.
        horizons: how far back rows see, by kind of layer.
        feature_layers: layers whose hidden states are returned.
    """
    items = plan.items
    groups = groups_of(items)
    lows = np.cumsum([0, *(len(item.token_ids) for item in items)]).tolist()
    raced_rows, plain_rows, starts = _logit_rows(items, races, lows)
    most_tokens = max((race.count for race in races if race is not None), default=0)
    candidates = min(count_bucket(most_tokens + LEAST_CANDIDATES) if raced_rows else 0, vocab_size)
    shape = StepShape(
        rows=count_bucket(plan.rows),
        groups=tuple(group.shape for group in groups),
        raced_rows=count_bucket(len(raced_rows)),
        plain_rows=count_bucket(len(plain_rows)),
        candidates=candidates,
        kinds=len(horizons),
        feature_layers=tuple(sorted(feature_layers)),
    )
    layout = layout_of(shape)
    integers = np.zeros(layout.size, np.int64)
    _put(integers, layout.logit_rows, raced_rows)
    _put(integers, Field(layout.logit_rows.start + shape.raced_rows, (shape.plain_rows,)), plain_rows)
    _put_rows(integers, plan, pool, layout)
    _put_races(integers, races, layout)
    query = _view(integers, layout.query)
    first_query = 0
    for group, fields in zip(groups, layout.groups, strict=True):
        _put_group(integers, group, fields, items, lows, pool)
        _put_visible(integers, group, fields, items, horizons)
        for place, index in enumerate(group.items):
            start, count = first_query + place * group.shape.rows, len(items[index].token_ids)
            query[lows[index] : lows[index] + count] = np.arange(start, start + count)
        first_query += group.shape.queries
    return PackedStep(shape, integers, starts, len(raced_rows), len(plain_rows))


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


def _put_rows(integers: Ids, plan: StepPlan, pool: PagePool, layout: Layout) -> None:
    """Tokens, positions and places of the new rows; padding is token 0 at position 0, written to the scratch row."""
    write = _view(integers, layout.write)
    write[:] = pool.scratch_row
    low = 0
    for item in plan.items:
        count = len(item.token_ids)
        high = low + count
        _view(integers, layout.token_ids)[low:high] = item.token_ids
        _view(integers, layout.positions)[low:high] = np.array(depths(item)) + (item.trunk - 1)
        write[low:high] = pool.rows_of(item.session, np.arange(item.base_length, item.base_length + count))
        low = high


def _put_races(integers: Ids, races: Sequence[Ranking | None], layout: Layout) -> None:
    rankings = [race for race in races if race is not None]
    counters = [counter_of(race.noise, position) for race in rankings for position in race.positions]
    # Words of the key need 32 bits of the 64, so signs don't matter.
    if counters:
        _view(integers, layout.counters)[: len(counters)] = counters
    temperatures = [np.float32(race.temperature) for race in rankings for _ in race.positions]
    _put(integers, layout.temperatures, np.array(temperatures, np.float32).view(np.int32).astype(np.int64))


def _put_group(
    integers: Ids,
    group: SessionGroup,
    fields: GroupFields,
    items: Sequence[StepItem],
    lows: Sequence[int],
    pool: PagePool,
) -> None:
    source = _view(integers, fields.source).reshape(group.shape.sessions, group.shape.rows)
    pages = _view(integers, fields.pages)
    pages[:] = pool.pages
    for place, index in enumerate(group.items):
        item = items[index]
        count = len(item.token_ids)
        session_pages = pool.pages_of(item.session)[: group.shape.pages]
        pages[place, : len(session_pages)] = session_pages
        source[place, :count] = np.arange(lows[index], lows[index] + count)
        _view(integers, fields.length)[place] = item.base_length + count
        _view(integers, fields.trunk)[place] = item.trunk


def _put_visible(
    integers: Ids,
    group: SessionGroup,
    fields: GroupFields,
    items: Sequence[StepItem],
    horizons: Sequence[Horizon | None],
) -> None:
    """Enter the keys that each query sees; padding sees row 0."""
    first, end, bits = (_view(integers, field) for field in (fields.first, fields.end, fields.bits))
    end[:] = 1
    for place, index in enumerate(group.items):
        item = items[index]
        count, positions = len(item.token_ids), key_positions(item)
        if item.is_chain:
            end[place, :count] = np.arange(item.base_length + 1, item.base_length + count + 1)
        else:
            end[place, :count] = item.trunk
        for kind, horizon in enumerate(horizons):
            if horizon is not None:
                first[kind, place, :count] = horizon[positions[item.base_length :]]
            if not item.is_chain:
                tree_bits = _tree_bits(item, horizon)
                bits[kind, place, :count, : tree_bits.shape[1]] = tree_bits


def _tree_bits(item: StepItem, horizon: Horizon | None) -> Ids:
    """[new rows, words]: which rows of the tree each new row sees, 64 to a word, the first in the lowest bit."""
    visible = np.zeros((len(item.token_ids), mask_words(item) * BITS), np.bool_)
    visible[:, : item.tree_rows] = visible_keys(item, horizon)[:, item.trunk :]
    return np.packbits(visible, axis=1, bitorder="little").view("<i8").astype(np.int64, copy=False)
