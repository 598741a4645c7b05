"""Engines whose rows, where the target's features end, go on from what the engine itself made of the row before.

EAGLE and multi-token prediction work so: each row yields, beside logits, what it would have the target's features be
(EAGLE, arXiv:2401.15077, section 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from paceline.drafters.heads.given import NOTHING, GivenBySession
from paceline.drafters.heads.paths import RowList, runs
from paceline.engine.features import FeatureRows
from paceline.engine.interface import NO_PREFIX, EngineInfo, Logits, Prefix, StepItem, StepPlan
from paceline.engine.ledger import depths
from paceline.protocol.features import FeatureNeed
from paceline.protocol.proposal import MAX_PROPOSAL_NODES

OWN_REACH = MAX_PROPOSAL_NODES
"""Rows behind the target's features that read the engine's own: as many as a proposal can be deep.

Rows further behind, and those with nothing given before them, read zeros. So the features of a long prompt may be
missing without its rows being computed one by one.
"""


@dataclass(frozen=True, eq=False)
class RowInputs:
    """What the new rows of a step read beside their tokens.

    `features` [rows, width], zeros where there are none. `behind`: how many rows each lies behind the last whose
    feature was given: 0 reads the target's own, `NOTHING` reads none.
    """

    features: torch.Tensor
    behind: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class RowOutputs:
    """What a step computed: logits as `Engine.step` gives them, and every row's own features [rows, width]."""

    logits: Sequence[Logits]
    own: torch.Tensor


class RowNetwork(Protocol):
    """Sessions of KV rows like an engine's, whose steps are told what rows read beside their tokens."""

    @property
    def info(self) -> EngineInfo:
        """Constant after loading."""

    @property
    def kv_rows(self) -> int:
        """KV rows held by all open sessions."""

    @property
    def need(self) -> FeatureNeed:
        """Constant; what the target must send."""

    @property
    def feature_width(self) -> int:
        """Constant; values of a row as the target sends it."""

    @property
    def empty_feature(self) -> torch.Tensor:
        """Zeros [width], of the dtype and on the device of what rows read."""

    def project(self, rows: torch.Tensor) -> torch.Tensor:
        """From what the target sends [n, feature_width] to what rows read [n, width]."""

    def open(self, session: int, max_rows: int, prefix: Prefix = NO_PREFIX) -> int:
        """As `Engine.open`."""

    def close(self, session: int) -> None:
        """As `Engine.close`."""

    def check(self, plan: StepPlan) -> None:
        """Refuse a plan that can't be followed; changes nothing."""

    def compute(self, plan: StepPlan, inputs: RowInputs) -> RowOutputs:
        """Run a checked step, whose rows read nothing of each other's outputs."""


class OwnFeaturesEngine:
    """A network as a `FeatureEngine`: it keeps what sessions were given, and what each row was computed to be."""

    reach: int | None = None

    def __init__(self, network: RowNetwork) -> None:
        self._network = network
        self.info, self.need, self.feature_width = network.info, network.need, network.feature_width
        self._empty = network.empty_feature
        self._given = GivenBySession(network.feature_width, len(self._empty), self._empty, network.project)
        self._own: dict[int, RowList[torch.Tensor]] = {}

    @property
    def kv_rows(self) -> int:  # noqa: D102
        return self._network.kv_rows

    def open(self, session: int, max_rows: int, prefix: Prefix = NO_PREFIX) -> int:
        """As `Engine.open`; begins with no rows, since another session's were computed on features of its own."""
        self._network.open(session, max_rows)
        self._given.open(session)
        self._own[session] = RowList()
        return 0

    def close(self, session: int) -> None:  # noqa: D102
        self._network.close(session)
        self._given.close(session)
        self._own.pop(session, None)

    def give(self, session: int, first_position: int, rows: FeatureRows) -> None:  # noqa: D102
        self._given.give(session, first_position, rows)

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> Sequence[Logits]:
        """As `Engine.step`; rows that read what others of the plan yield are computed after those."""
        self._network.check(plan)
        # Runs yield rows in their own order, so each is asked in that order too.
        cut = [[*self._runs(replace(item, logit_rows=tuple(sorted(item.logit_rows))))] for item in plan.items]
        found: list[list[Logits]] = [[] for _ in plan.items]
        for turn in range(max(map(len, cut))):
            places = [place for place, items in enumerate(cut) if turn < len(items)]
            outputs = self._compute([cut[place][turn] for place in places])
            for place, logits in zip(places, outputs, strict=True):
                found[place].append(logits.copy())
        for item in plan.items:
            self._given.stepped(item)
        return [
            np.concatenate(parts)[np.searchsorted(sorted(item.logit_rows), item.logit_rows)]
            for item, parts in zip(plan.items, found, strict=True)
        ]

    def _compute(self, items: Sequence[StepItem]) -> Sequence[Logits]:
        for item in items:
            self._own[item.session].keep(item)
        behind = [self._behind(item) for item in items]
        features = torch.cat([self._read(item, each) for item, each in zip(items, behind, strict=True)])
        inputs = RowInputs(features, tuple(each for rows in behind for each in rows))
        outputs = self._network.compute(StepPlan(tuple(items)), inputs)
        own = iter(outputs.own)
        for item in items:
            for _ in item.token_ids:
                self._own[item.session].add(next(own))
        return outputs.logits

    def _runs(self, item: StepItem) -> Sequence[StepItem]:
        behind = self._behind(item)
        return [*runs(item, lambda row: behind[row] > 0)]

    def _behind(self, item: StepItem) -> list[int]:
        """For each new row, as `RowInputs` has it."""
        given = self._given[item.session]
        found: list[int] = []
        for depth in depths(item):
            before = item.trunk + depth - 2
            nearest = given.nearest(before)
            within = nearest != NOTHING and before - nearest <= OWN_REACH
            found.append(before - nearest if within else NOTHING)
        return found

    def _read(self, item: StepItem, behind: Sequence[int]) -> torch.Tensor:  # [new rows, width]
        features = self._empty.repeat(len(behind), 1)
        given = [row for row, each in enumerate(behind) if each == 0]
        if given:
            depth = depths(item)
            features[given] = self._given[item.session].at([item.trunk + depth[row] - 2 for row in given])
        for row, each in enumerate(behind):
            if each > 0:
                own = self._own[item.session].parent(item, row)
                assert own is not None, "something before it is given"
                features[row] = own
        return features
