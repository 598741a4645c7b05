"""A drafter that notes which of the target's features it is given, and what they should have been."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draft_service.drafters.interface import DrafterManifest
from draft_service.drafters.model import ModelDraft, ModelDrafter
from paceline.engine.features import FeatureRows
from paceline.engine.interface import Engine
from paceline.engine.table.engine import table_features
from paceline.protocol.draft import DraftBudget
from paceline.protocol.features import EMBEDDING, FINAL, FeatureNeed
from paceline.protocol.session import SessionSpec
from paceline.sampling.processors import Follower

NEED = FeatureNeed((2, EMBEDDING, FINAL))


class FeatureSpy(ModelDrafter):
    """Drafts as its model does, whatever it is given. `texts` and `taken` are by session, as they came.

    `begun`: the session of each proposal.
    """

    def __init__(self, engine: Engine, need: FeatureNeed = NEED) -> None:
        super().__init__(engine, prefill_chunk=16)
        self.manifest = DrafterManifest("model", need)
        self.texts: dict[int, list[int]] = {}
        self.taken: dict[int, list[tuple[int, FeatureRows]]] = {}
        self.begun: list[int] = []

    def open(self, session: int, spec: SessionSpec, follower: Follower | None = None) -> int:
        self.texts[session], self.taken[session] = [*spec.token_ids], []
        return super().open(session, spec, follower)

    def commit(self, session: int, token_ids: Sequence[int], *, shadow: bool = False) -> None:
        self.texts[session] += token_ids
        super().commit(session, token_ids, shadow=shadow)

    def begin(self, session: int, budget: DraftBudget, proposal_id: int) -> ModelDraft:
        self.begun.append(session)
        return super().begin(session, budget, proposal_id)

    def take_features(self, session: int, first_position: int, rows: FeatureRows) -> None:
        assert first_position + len(rows) <= len(self.texts[session]), "of committed tokens alone"
        self.taken[session].append((first_position, rows))


def positions(taken: Sequence[tuple[int, FeatureRows]]) -> list[int]:
    """Of every row that came, as they came."""
    return [first + row for first, rows in taken for row in range(len(rows))]


def misplaced(
    taken: Sequence[tuple[int, FeatureRows]], text: Sequence[int], need: FeatureNeed = NEED, within: float = 0.0
) -> list[int]:
    """Positions whose features are not those of the text up to there, by more than `within` at any value."""
    found = []
    for first, rows in taken:
        for position, row in enumerate(rows, start=first):
            right = table_features(text[: position + 1], need)
            if not np.allclose(row, right, rtol=0, atol=within):
                found.append(position)
    return found
