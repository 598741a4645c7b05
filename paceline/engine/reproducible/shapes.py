"""Fixed shapes: how a ragged step is cut into passes whose bits depend on no other session. Pure.

Products of different numbers of rows differ in their last bits, and so do sums
over different lengths. So in reproducible mode there are two shapes of a pass,
and attention sums over a length that is a function of the position alone
(a bucket). Prompt rows run in passes of `PROMPT_ROWS`, each at the index that
its position has in its chunk; all later rows run in passes of `decode_rows`, a
setting, at any index and beside any other rows. Passes are padded to their shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from paceline.engine.interface import StepItem, StepPlan

PROMPT_ROWS = 64
"""Rows of a prompt's pass."""
BUCKET_ROWS = 128
"""Keys of a bucket: attention sums over whole buckets."""
TILE_ROWS = 8
"""Rows that attend together; both shapes are made of whole tiles.

docs/decisions/2026-11-21-reproducible-by-shape.md has what was tried for all three: eight queries make every buffer a
multiple of 64 bytes, which the library's sums depend on.
"""


def describe_shapes(decode_rows: int) -> str:
    """For the numeric fingerprint."""
    return f"decode {decode_rows}, prompt {PROMPT_ROWS}, buckets of {BUCKET_ROWS}, tiles of {TILE_ROWS}"


def bucket(rows: int) -> int:
    """The smallest bucket that holds so many rows."""
    return -(-rows // BUCKET_ROWS) * BUCKET_ROWS


@dataclass(frozen=True)
class RowPlacement:
    """New rows [start, end) of an item, at rows `pass_row`, `pass_row` + 1, … of a pass."""

    item: StepItem
    start: int
    end: int
    pass_row: int


@dataclass(frozen=True)
class Pass:
    """One forward pass of `rows` rows, padding included."""

    rows: int
    placements: tuple[RowPlacement, ...]


def passes(plan: StepPlan, prompt_rows: Mapping[int, int], decode_rows: int) -> list[Pass]:
    """Cut a step into passes; a row's ancestors are in its own pass or in an earlier one.

    `prompt_rows`: of each session, the rows that have the prompt's shape.
    """
    prompt_passes: list[Pass] = []
    later: list[tuple[StepItem, int]] = []
    for item in plan.items:
        prompt_end = min(chain_rows(item), max(0, prompt_rows[item.session] - item.base_length))
        prompt_passes.extend(_prompt_passes(item, prompt_end))
        if prompt_end < len(item.token_ids):
            later.append((item, prompt_end))
    return prompt_passes + list(_decode_passes(later, decode_rows))


def chain_rows(item: StepItem) -> int:
    """The number of new rows, from the first on, that form a chain which every later row descends from."""
    count = len(item.token_ids)
    branching = ((row, item.parent_of(row)) for row in range(count))
    return min((parent + 1 for row, parent in branching if parent != row - 1), default=count)


def tree_paths(item: StepItem, start: int, end: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut rows [start, end) of an item's tree into groups that each lie on one path.

    Returns:
        For each group the whole path, from the first row that hangs from the
        chain on, and the group's own rows, ascending.
    """
    remaining = set(range(start, end))
    root = chain_rows(item)
    groups = []
    for leaf in range(end - 1, start - 1, -1):
        if leaf not in remaining:
            continue
        path, row = [], leaf
        while row >= root:
            path.append(row)
            row = item.parent_of(row)
        path.reverse()
        groups.append((tuple(path), tuple(each for each in path if each in remaining)))
        remaining.difference_update(path)
    return groups


def by_bucket(positions: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut ascending positions into runs [start, end) of one bucket each."""
    start = 0
    for index in range(1, len(positions) + 1):
        if index == len(positions) or bucket(positions[index] + 1) != bucket(positions[start] + 1):
            yield start, index
            start = index


def _prompt_passes(item: StepItem, end: int) -> Iterator[Pass]:
    start = 0
    while start < end:
        pass_row = (item.base_length + start) % PROMPT_ROWS
        stop = min(end, start + PROMPT_ROWS - pass_row)
        yield Pass(PROMPT_ROWS, (RowPlacement(item, start, stop, pass_row),))
        start = stop


def _decode_passes(items: Sequence[tuple[StepItem, int]], rows: int) -> Iterator[Pass]:
    placements: list[RowPlacement] = []
    pass_row = 0
    for item, first in items:
        start, count = first, len(item.token_ids)
        while start < count:
            end = min(count, start + rows - pass_row)
            placements.append(RowPlacement(item, start, end, pass_row))
            pass_row += end - start
            start = end
            if pass_row == rows:
                yield Pass(rows, tuple(placements))
                placements, pass_row = [], 0
    if placements:
        yield Pass(rows, tuple(placements))
