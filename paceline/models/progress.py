"""How far a pull is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PullProgress:
    """How far a pull is; `fraction` counts the whole pull, in [0, 1]."""

    stage: Literal["download", "extract", "load", "convert", "check", "done"]
    fraction: float


ProgressCallback = Callable[[PullProgress], None]
