"""Text to distil from: rows of token ids that say who wrote each token.

The target writes its own training text on the project's own engine, so there is
no corpus and no licence question. Every draw comes from the shared noise, keyed
by (seed, row, position): a shard is a function of its recipe, whatever was
written before it, and an interrupted run goes on at its first missing shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.protocol.errors import InvalidInput, require
from paceline.runtime.files import replace_file

HELD_OUT_SHARE = 0.05
"""Share of the rows of each temperature that is held out; chosen, not tuned."""
TokenIds = tuple[int, ...]


class Role(IntEnum):
    """Who wrote a token. Drafts learn and are measured on what the target wrote as the assistant."""

    FORCED = 0
    USER = 1
    ANSWER = 2
    THINKING = 3


@dataclass(frozen=True, eq=False)
class Row:
    """One text, with no padding; `temperature` is the assistant turn's."""

    token_ids: NDArray[np.int32]  # [length]
    roles: NDArray[np.int8]  # [length]
    temperature: float

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        """Tokens that a draft is trained and measured on. Returns [length]."""
        return self.roles >= Role.ANSWER


def save_shard(file: Path, rows: Sequence[Row], vocab_size: int, *, seed: int = 0, first_row: int = 0) -> None:
    """Save rows as arrays [rows, longest], padded with forced zeros."""
    longest = max(len(row.token_ids) for row in rows)
    token_ids = np.zeros((len(rows), longest), np.uint16 if vocab_size <= 1 << 16 else np.uint32)
    roles = np.zeros((len(rows), longest), np.int8)
    for i, row in enumerate(rows):
        token_ids[i, : len(row.token_ids)] = row.token_ids
        roles[i, : len(row.roles)] = row.roles
    temperatures = np.array([row.temperature for row in rows], np.float32)

    def write(temporary: Path) -> None:
        with temporary.open("wb") as out:
            np.savez_compressed(
                out,
                token_ids=token_ids,
                role=roles,
                temperature=temperatures,
                seed=np.uint64(seed),
                first_row=np.int64(first_row),
            )

    replace_file(file, write)


def read_shards(path: Path) -> list[Row]:
    """Read one shard, or every shard of a folder in order.

    Raises:
        InvalidInput: nothing readable there.
    """
    # A killed write leaves a file whose name begins with a dot.
    files = sorted(path.glob("[!.]*.npz")) if path.is_dir() else [path]
    require(bool(files), "data", str(path), "a folder with .npz shards")
    rows: list[Row] = []
    for file in files:
        arrays = read_arrays("data", file)
        tokens, roles, temperatures = (arrays.get(name) for name in ("token_ids", "role", "temperature"))
        if tokens is None or roles is None or temperatures is None or not _fit(tokens, roles, temperatures):
            raise InvalidInput.of(
                "data", str(file), "an .npz of token_ids and role [rows, longest], temperature [rows]"
            )
        rows += map(_unpad, tokens, roles, temperatures)
    return rows


def read_arrays(field: str, file: Path) -> dict[str, NDArray[Any]]:
    """Every array of an `.npz`; raises `InvalidInput` for a file that is none, or is not whole."""
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except Exception as error:
        raise InvalidInput.of(field, str(file), f"a whole .npz ({error})") from error


def _fit(tokens: NDArray[Any], roles: NDArray[Any], temperatures: NDArray[Any]) -> bool:
    """Whether arrays are a shard's, by their shapes and kinds of numbers."""
    whole = tokens.dtype.kind in "ui" and roles.dtype.kind in "ui" and temperatures.dtype.kind == "f"
    return whole and tokens.ndim == 2 and tokens.shape == roles.shape and temperatures.shape == tokens.shape[:1]


def _unpad(tokens: NDArray[Any], roles: NDArray[Any], temperature: float) -> Row:
    token_places = np.flatnonzero(roles)
    length = int(token_places[-1]) + 1 if token_places.size else 0
    return Row(tokens[:length].astype(np.int32), roles[:length].astype(np.int8), round(float(temperature), 6))


def count_learned_tokens(rows: Iterable[Row]) -> int:
    """Tokens that a draft learns from."""
    return sum(int(row.loss_mask.sum()) for row in rows)


@dataclass(frozen=True)
class Split:
    """Rows to learn from and rows kept apart, every temperature in both."""

    train: tuple[Row, ...]
    held_out: tuple[Row, ...]


def split_rows(rows: Sequence[Row], share: float = HELD_OUT_SHARE) -> Split:
    """Hold out the last `share` of the rows of each temperature, at least one of each.

    Raises:
        InvalidInput: a temperature has a single row, or no row has anything to learn.
    """
    useful = [row for row in rows if row.loss_mask.any()]
    require(bool(useful), "rows with text of the assistant's", 0, "at least 2")
    train: list[Row] = []
    held_out: list[Row] = []
    for temperature in sorted({row.temperature for row in useful}):
        group = [row for row in useful if row.temperature == temperature]
        require(len(group) >= 2, f"rows at temperature {temperature:g}", len(group), "at least 2")
        boundary = len(group) - max(1, round(share * len(group)))
        train += group[:boundary]
        held_out += group[boundary:]
    return Split(tuple(train), tuple(held_out))
