"""One array of 64-bit integers holds all inputs of a step; a layout says where. Pure.

One array means one upload, and addresses that stay: a graph reads the same places at every replay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from paceline.engine.cuda.buckets import StepShape


@dataclass(frozen=True)
class Field:
    """A place in the array."""

    start: int
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """One past the last integer."""
        return self.start + math.prod(self.shape)


@dataclass(frozen=True)
class GroupFields:
    """The fields of one group that attends together."""

    source: Field
    """[queries]: the packed row of each query; padding points to row 0."""
    pages: Field
    """[sessions, pages]"""
    length: Field
    """[sessions]: KV rows, new ones included."""
    trunk: Field
    """[sessions]: where the rows that `bits` cover begin."""
    first: Field
    """[kinds, sessions, rows]: the first row that each query sees in layers of a kind."""
    end: Field
    """[sessions, rows]: each query sees all rows from `first` up to this one, which it does not; at least row 0."""
    bits: Field
    """[kinds, sessions, rows, words]: the rows of the tree that each query sees besides."""


@dataclass(frozen=True)
class Layout:
    """Places of a shape's integers."""

    token_ids: Field
    """[rows]"""
    positions: Field
    """[rows]"""
    write: Field
    """[rows]: the pool's row that takes each packed row's keys and values."""
    query: Field
    """[rows]: where the groups, one after another, have each packed row."""
    logit_rows: Field
    """[raced_rows + plain_rows]: packed rows that need logits."""
    counters: Field
    """[raced_rows, 4]: position, tag, and the two words of the key."""
    temperatures: Field
    """[raced_rows]: the bits of a float32; 0: greedy."""
    top_k: Field
    """[raced_rows]: 0: all ids."""
    groups: tuple[GroupFields, ...]
    size: int


@lru_cache(maxsize=4096)
def layout_of(shape: StepShape) -> Layout:
    """The layout of a shape."""
    end = 0

    def place(*size: int) -> Field:
        nonlocal end
        field = Field(end, size)
        end = field.end
        return field

    rows = shape.rows
    head = (place(rows), place(rows), place(rows), place(rows), place(shape.logit_rows))
    race = (place(shape.raced_rows, 4), place(shape.raced_rows), place(shape.raced_rows))
    groups = tuple(
        GroupFields(
            source=place(group.queries),
            pages=place(group.sessions, group.pages),
            length=place(group.sessions),
            trunk=place(group.sessions),
            first=place(shape.kinds, group.sessions, group.rows),
            end=place(group.sessions, group.rows),
            bits=place(shape.kinds, group.sessions, group.rows, group.words),
        )
        for group in shape.groups
    )
    return Layout(*head, *race, groups, end)


def part(inputs: torch.Tensor, field: Field) -> torch.Tensor:
    """A field of the array on the device, as a view."""
    return inputs[field.start : field.end].view(field.shape)
