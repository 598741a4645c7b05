"""The keys of a GGUF file's architecture: typed, within bounds, and none left unread."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeGuard

import numpy as np

from paceline.models.gguf_header import GgufHeader
from paceline.protocol.errors import InvalidInput, require

MOST_LAYERS = 512
_HARMLESS = ("tensor_data_layout", "rope.scaling.finetuned")
"""Keys that llama.cpp shows and does not use."""
_NEUTRAL: Mapping[str, object] = {
    "attention.causal": True,
    "pooling_type": 0,
    "expert_count": 0,
    "expert_used_count": 0,
    "expert_gating_func": 1,
    "rope.scaling.alpha": 0.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}
"""Values without effect, of keys that llama.cpp does not use for the architectures that are read."""


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


class GgufKeys:
    """The keys of a file's architecture. It notes which have been read.

    Every reader raises `InvalidInput` with the key, its value and what it must be.
    """

    def __init__(self, header: GgufHeader) -> None:
        self._prefix = header.architecture + "."
        entries = header.metadata.items()
        self._values = {
            key.removeprefix(self._prefix): value for key, value in entries if key.startswith(self._prefix)
        }
        self._read_keys: set[str] = set()

    def require(self, condition: bool, key: str, value: object, limit: str) -> None:
        """Refuse a key's value unless the condition holds."""
        require(condition, self._prefix + key, value, limit)

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """A whole number in [low, high]; without a default it must be in the file."""
        value = self._one(key, default)
        if is_whole(value) and low <= value <= high:
            return value
        raise InvalidInput.of(self._prefix + key, value, f"a whole number in [{low}, {high}]")

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """As `integer`, for any number."""
        value = self._one(key, default)
        number = value if isinstance(value, float) or is_whole(value) else math.nan
        self.require(low <= number <= high, key, value, f"a number in [{low:g}, {high:g}]")
        return float(number)

    def text(self, key: str, choices: tuple[str, ...], default: str) -> str:
        """One of some words."""
        value = str(self._one(key, default))
        self.require(value in choices, key, value, f"one of: {', '.join(choices)}")
        return value

    def only(self, key: str, neutral: object) -> None:
        """Refuse any other value, if there is one."""
        if key in self._values:
            value = self._one(key, None)
            self.require(not isinstance(value, np.ndarray) and value == neutral, key, value, f"{neutral} or absent")

    def windows(self, layers: int, every: int) -> list[bool]:
        """Whether each layer has a window: all but each `every`th, if the file doesn't say."""
        key = "attention.sliding_window_pattern"
        value = self._values.get(key)
        if isinstance(value, np.ndarray):
            self._read_keys.add(key)
            self.require(len(value) == layers, key, value, f"one for each of {layers} layers")
            return [bool(each) for each in value]
        every = self.integer(key, 0, MOST_LAYERS, every)
        return [every == 0 or layer % every < every - 1 for layer in range(layers)]

    def refuse_others(self) -> None:
        """Refuse by name keys that have not been read."""
        for key in self._values.keys() - self._read_keys - set(_HARMLESS):
            if key not in _NEUTRAL:
                raise InvalidInput.of(self._prefix + key, self._values[key], "absent: nothing here computes it")
            self.only(key, _NEUTRAL[key])

    def _one(self, key: str, default: object) -> object:
        """A value, also where an array gives the same to each layer."""
        self._read_keys.add(key)
        value = self._values.get(key, default)
        if isinstance(value, np.ndarray) and 0 < len(value) <= MOST_LAYERS and (value == value[0]).all():
            return value[0].item()
        self.require(value is not None, key, value, "in the file")
        return value
