"""One rank's share of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.engine.interface import Engine, Logits, StepPlan
from paceline.engine.parallel.draws import Share
from paceline.engine.wrapped import WrappedEngine

if TYPE_CHECKING:
    from paceline.engine.checks import PlainReference


@dataclass(frozen=True)
class RankEngine:
    """One rank's share of a model; `reference` on rank 0, where the model is a decoder."""

    engine: Engine
    reference: PlainReference | None = None


class TableShare(WrappedEngine):
    """A whole table on every rank, each showing its share of the vocabulary."""

    def __init__(self, inner: Engine, share: Share) -> None:
        super().__init__(inner)
        self._share = share

    def step(self, plan: StepPlan) -> Sequence[Logits]:  # noqa: D102
        return [logits[:, self._share.first : self._share.last] for logits in self._inner.step(plan)]
