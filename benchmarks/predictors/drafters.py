"""Drafters of known differences, made from one: to rank drafters takes more of them than a target comes with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.engine.interface import Engine, Logits, StepPlan
from paceline.engine.wrapped import WrappedEngine

AS_IT_IS = "as it is"


@dataclass(frozen=True)
class LogitChange:
    """What is done to a draft's logits.

    Attributes:
        sharpness: factor; the order of tokens stays, confidence is wrong where it isn't 1.
        noise: standard deviation of what is added to each id's logit, the same at every position.
    """

    sharpness: float = 1.0
    noise: float = 0.0


DISTURBED: Mapping[str, LogitChange] = {
    AS_IT_IS: LogitChange(),
    "sharper": LogitChange(sharpness=2.0),
    "flatter": LogitChange(sharpness=0.5),
    "noise .7": LogitChange(noise=0.7),
    "noise 1.5": LogitChange(noise=1.5),
    "noise 3": LogitChange(noise=3.0),
    "sharper, noise .7": LogitChange(2.0, 0.7),
    "sharper, noise 1.5": LogitChange(2.0, 1.5),
    "flatter, noise .7": LogitChange(0.5, 0.7),
}
"""Overconfident and underconfident drafts of every quality. Chosen to cover the range, not tuned."""


class DisturbedEngine(WrappedEngine):
    """A draft with other logits; `Engine` says what its methods promise. Ids that it excludes stay excluded."""

    def __init__(self, inner: Engine, change: LogitChange, seed: int = 0) -> None:
        super().__init__(inner)
        random = np.random.default_rng(seed)
        size = inner.info.fingerprint.vocab_size
        self._added = random.normal(0.0, change.noise, size).astype(np.float32)  # [V]
        self._sharpness = np.float32(change.sharpness)

    def step(self, plan: StepPlan) -> Sequence[Logits]:  # noqa: D102
        return [(logits + self._added) * self._sharpness for logits in self._inner.step(plan)]


def disturbed_drafters(draft: Engine) -> dict[str, Engine]:
    """All of `DISTURBED` by name, on one engine."""
    return {name: DisturbedEngine(draft, each) for name, each in DISTURBED.items()}
