"""Names of table models: `table:vocab=64,seed=1,…`, parsed and checked in one place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TypeVar

from paceline.protocol.errors import InvalidInput, require

PREFIX = "table:"
Number = TypeVar("Number", int, float)

_TEXT: Mapping[str, float] = MappingProxyType(
    {"vocab": 2048, "contexts": 2048, "sharpness": 5.95, "sharpness_spread": 0.47}
)
DISTRIBUTIONS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "text": _TEXT,
        "close": {**_TEXT, "disturb": 0.35, "disturb_spread": 0.42, "disturb_tail": 0.4},
        "middling": {**_TEXT, "disturb": 0.95, "disturb_spread": 0.38, "disturb_tail": 0.44},
        "poor": {**_TEXT, "disturb": 2.36, "disturb_spread": 0.42, "disturb_tail": 0.29},
    }
)
"""Named distributions: a target, `text`, and three drafts of it.

Fitted to what was measured at temperature 1 on SmolLM2-135M's own text with drafts of three qualities: overlap,
coupled match, and how often the target's token is among the draft's best 1, 2, 4 and 8 under shared noise, after an
accepted token and after a mismatch (weighted least squares over those columns, by Nelder-Mead). The measured columns
and the check of the fit: `tests/lab/test_distributions.py`.
"""


def is_table(model: str) -> bool:
    """Whether a model name is a table model's."""
    return model == "table" or model.startswith(PREFIX)


def _number_field(low: float, high: float, default: Number) -> Number:
    """A field of a number in [low, high]."""
    spec: Number = field(default=default, metadata={"limits": (low, high)})
    return spec


@dataclass(frozen=True)
class TableSpec:
    """A table model.

    Contexts differ in how certain the next token is, and in how well a draft
    predicts it: the spreads say by how much.

    Attributes:
        vocab: vocabulary size; 257 and more reads text as bytes, fewer as letters.
        seed: of the logit table.
        contexts: rows of the table.
        order: tokens of history that the distribution depends on; 0: all of them.
        sharpness: standard deviation of the logits.
        sharpness_spread: standard deviation, over contexts, of log sharpness; `sharpness` is the median.
        noise: share of a second table, seeded `noise_seed`, mixed in.
        disturb: standard deviation of what is added to the logits, seeded `noise_seed`.
        disturb_spread: standard deviation, over contexts, of log disturb; `disturb` is the median.
        disturb_tail: standard deviation, over the ids of a context, of log disturb.
        invert: 1 negates the logits, which ranks tokens the opposite way.
        max_length: context length in tokens.
        max_kv_rows: KV budget in rows.
        eos: id that ends a text; -1: id 256 where the vocabulary has it, else none.
        think: 1 makes ids 0 and 1 the marks of reasoning, `<think>` and `</think>`; with letters alone.
        step_ms, row_ms: time that a step waits, and adds for each row.
    """

    vocab: int = _number_field(2, 1 << 20, 64)
    seed: int = _number_field(0, 2**63, 1)
    contexts: int = _number_field(1, 1 << 20, 257)
    order: int = _number_field(0, 1 << 20, 0)
    sharpness: float = _number_field(0, 1e3, 2.0)
    sharpness_spread: float = _number_field(0, 4, 0.0)
    noise: float = _number_field(0, 1, 0.0)
    noise_seed: int = _number_field(0, 2**63, 2)
    disturb: float = _number_field(0, 1e3, 0.0)
    disturb_spread: float = _number_field(0, 4, 0.0)
    disturb_tail: float = _number_field(0, 4, 0.0)
    invert: int = _number_field(0, 1, 0)
    max_length: int = _number_field(1, 1 << 22, 4096)
    max_kv_rows: int = _number_field(1, 1 << 40, 1_000_000)
    eos: int = _number_field(-1, math.inf, -1)
    think: int = _number_field(0, 1, 0)
    step_ms: float = _number_field(0, 60_000, 0.0)
    row_ms: float = _number_field(0, 60_000, 0.0)

    def __post_init__(self) -> None:
        for each in fields(self):
            value, (low, high) = getattr(self, each.name), each.metadata["limits"]
            high = min(high, {"eos": self.vocab - 1, "think": int(2 < self.vocab <= 256)}.get(each.name, high))
            if not (math.isfinite(value) and low <= value <= high):
                raise InvalidInput.of(f"table {each.name}", value, f"in [{low:g}, {high:g}]")

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a text, if any."""
        if self.eos >= 0:
            return self.eos
        return 256 if self.vocab > 256 else None

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Texts that are one token."""
        return {"<think>": 0, "</think>": 1} if self.think else {}

    @property
    def distribution(self) -> str:
        """The canonical name of the distribution, without lengths, budgets, times and texts."""
        others = ("max_length", "max_kv_rows", "think", "step_ms", "row_ms")
        parts = [f"{f.name}={getattr(self, f.name):g}" for f in fields(self) if f.name not in others]
        return PREFIX + ",".join(parts)

    @classmethod
    def parse(cls, model: str) -> TableSpec:
        """Read `table:key=value,…`; `distribution=NAME` stands for the keys of a named one, later keys override it.

        Raises:
            InvalidInput: an unknown key or distribution, or a value outside its limits.
        """
        text = model.removeprefix("table").removeprefix(":")
        kinds = {f.name: int if f.type == "int" else float for f in fields(cls)}
        values: dict[str, int | float] = {}
        for part in filter(None, text.split(",")):
            key, _, value = part.partition("=")
            if key == "distribution":
                require(value in DISTRIBUTIONS, "table distribution", value, f"one of {', '.join(DISTRIBUTIONS)}")
                values |= DISTRIBUTIONS[value]
                continue
            if key not in kinds:
                raise InvalidInput.of("table key", key, f"one of distribution, {', '.join(kinds)}")
            try:
                values[key] = kinds[key](value)
            except ValueError as error:
                raise InvalidInput.of(f"table {key}", value, "a number") from error
        return cls(**values)  # type: ignore[arg-type]  # kinds gave each key its own type
