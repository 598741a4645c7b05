"""Names of table models: `table:vocab=64,seed=1,…`, parsed and checked in one place."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from paceline.errors import InvalidInput

PREFIX = "table:"


def is_table(model: str) -> bool:
    """Whether a model name is a table model's."""
    return model == "table" or model.startswith(PREFIX)


@dataclass(frozen=True)
class TableSpec:
    """A table model.

    Attributes:
        vocab: vocabulary size; 257 and more reads text as bytes, fewer as letters.
        seed: of the logit table.
        contexts: rows of the table.
        order: tokens of history that the law depends on; 0: all of them.
        sharpness: standard deviation of the logits.
        noise: share of a second table, seeded `noise_seed`, mixed in.
        invert: 1 negates the logits, which ranks tokens the opposite way.
        max_length: context length in tokens.
        max_kv_rows: KV budget in rows.
        eos: id that ends a text; -1: id 256 where the vocabulary has it, else none.
        step_ms, row_ms: time that a step waits, and adds for each row.
    """

    vocab: int = 64
    seed: int = 1
    contexts: int = 257
    order: int = 0
    sharpness: float = 2.0
    noise: float = 0.0
    noise_seed: int = 2
    invert: int = 0
    max_length: int = 4096
    max_kv_rows: int = 1_000_000
    eos: int = -1
    step_ms: float = 0.0
    row_ms: float = 0.0

    def __post_init__(self) -> None:
        limits: dict[str, tuple[float, float]] = {
            "vocab": (2, 1 << 20),
            "seed": (0, 2**63),
            "contexts": (1, 1 << 20),
            "order": (0, 1 << 20),
            "sharpness": (0, 1e3),
            "noise": (0, 1),
            "noise_seed": (0, 2**63),
            "invert": (0, 1),
            "max_length": (1, 1 << 22),
            "max_kv_rows": (1, 1 << 40),
            "eos": (-1, self.vocab - 1),
            "step_ms": (0, 60_000),
            "row_ms": (0, 60_000),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high):
                raise InvalidInput.of(f"table {name}", value, f"in [{low:g}, {high:g}]")

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a text, if any."""
        if self.eos >= 0:
            return self.eos
        return 256 if self.vocab > 256 else None

    @property
    def law(self) -> str:
        """The canonical name of the distribution, without lengths, budgets and times."""
        skipped = ("max_length", "max_kv_rows", "step_ms", "row_ms")
        parts = [f"{f.name}={getattr(self, f.name):g}" for f in fields(self) if f.name not in skipped]
        return PREFIX + ",".join(parts)

    @classmethod
    def parse(cls, model: str) -> TableSpec:
        """Read `table:key=value,…`.

        Raises:
            InvalidInput: an unknown key, or a value outside its limits.
        """
        text = model.removeprefix("table").removeprefix(":")
        kinds = {f.name: int if f.type == "int" else float for f in fields(cls)}
        values: dict[str, int | float] = {}
        for part in filter(None, text.split(",")):
            key, _, value = part.partition("=")
            if key not in kinds:
                raise InvalidInput.of("table key", key, f"one of {', '.join(kinds)}")
            try:
                values[key] = kinds[key](value)
            except ValueError as error:
                raise InvalidInput.of(f"table {key}", value, "a number") from error
        return cls(**values)  # type: ignore[arg-type]  # kinds gave each key its own type
