"""Engines whose rows read the engine's own output for the row before, where the target's features end.

EAGLE and multi-token prediction work so: beside logits, each row yields a prediction of the target's features
(EAGLE, arXiv:2401.15077, section 3.1).

States of a session's rows, which move as steps keep and drop rows; and how a step is cut into runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from paceline.drafters.heads.target_features import NOTHING, TargetFeatures
from paceline.engine.features import FeatureRows
from paceline.engine.interface import NO_PREFIX, EngineInfo, Logits, Prefix, StepItem, StepPlan
from paceline.engine.ledger import depths
from paceline.protocol.features import FeatureNeed
from paceline.protocol.proposal import MAX_PROPOSAL_NODES

RowState = TypeVar("RowState")


class RowList(Generic[RowState]):
    """The states of one session's rows, by their index."""

    def __init__(self) -> None:
        self._rows: list[RowState] = []

    def keep(self, item: StepItem) -> None:
        """Keep the rows that a step keeps, in their new places."""
        start = item.base_length - len(item.kept_rows)
        self._rows[start:] = [self._rows[row] for row in item.kept_rows]

    def add(self, state: RowState) -> None:
        """Add the next new row's state."""
        self._rows.append(state)

    def parent(self, item: StepItem, new: int) -> RowState | None:
        """The state of the parent of new row `new`, once the kept rows are in place; None: it has no parent."""
        row = parent_row(item, new)
        return None if row < 0 else self._rows[row]


def parent_row(item: StepItem, new: int) -> int:
    """Index, within the session, of the parent of new row `new`; -1: it has none."""
    return item.trunk + item.parent_of(item.kept_tree + new)


def runs(item: StepItem, reads_parent: Callable[[int], bool]) -> Iterator[StepItem]:
    """The steps that compute a step's new rows, such that no row reads the output of one in the same step.

    `reads_parent(row)`: whether new row `row` reads the output of the row before it.
    """
    first, count = 0, len(item.token_ids)
    for row in range(1, count + 1):
        in_run = row < count and not (reads_parent(row) and parent_row(item, row) >= item.base_length + first)
        if not in_run:
            yield _run(item, first, row)
            first = row


def _run(item: StepItem, first: int, end: int) -> StepItem:
    """New rows [first, end) of a step, behind those before them."""
    return replace(
        item,
        base_length=item.base_length + first,
        token_ids=item.token_ids[first:end],
        parents=item.parents[: item.kept_tree + end],
        kept_rows=item.kept_rows if first == 0 else (),
        logit_rows=tuple(row - first for row in item.logit_rows if first <= row < end),
        trunk_length=item.trunk,
    )


OWN_REACH = MAX_PROPOSAL_NODES
"""Rows behind the target's features that read the engine's own: as many as a proposal can be deep.

Rows further behind, and rows without a given feature before them, read zeros. So the features of a long prompt may
be missing without its rows being computed one by one.
"""


@dataclass(frozen=True, eq=False)
class RowInputs:
    """The inputs of a step's new rows beside their tokens.

    Attributes:
        features: [rows, width], zeros where there are none.
        distances: how many rows each lies behind the last one whose feature was given. 0: it reads the target's own
            feature; `NOTHING`: it reads none.
    """

    features: torch.Tensor
    distances: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class RowOutputs:
    """The outputs of a step: logits as `Engine.step` gives them, and every row's own features [rows, width]."""

    logits: Sequence[Logits]
    features: torch.Tensor


class RowNetwork(Protocol):
    """Sessions of KV rows like an engine's, whose steps get features for rows beside their tokens."""

    @property
    def info(self) -> EngineInfo:
        """Constant after loading."""

    @property
    def kv_rows(self) -> int:
        """KV rows of all open sessions."""

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
        """Refuse a plan that sessions can't follow; changes nothing."""

    def compute(self, plan: StepPlan, inputs: RowInputs) -> RowOutputs:
        """Run a checked step whose rows don't read each other's outputs."""


class OwnFeaturesEngine:
    """A network as a `FeatureEngine`: it keeps the features that sessions were given, and each row's own output."""

    reach: int | None = None

    def __init__(self, network: RowNetwork) -> None:
        self._network = network
        self.info, self.need, self.feature_width = network.info, network.need, network.feature_width
        self._empty = network.empty_feature
        self._features = TargetFeatures(network.feature_width, len(self._empty), self._empty, network.project)
        self._outputs: dict[int, RowList[torch.Tensor]] = {}

    @property
    def kv_rows(self) -> int:  # noqa: D102
        return self._network.kv_rows

    def open(self, session: int, max_rows: int, prefix: Prefix = NO_PREFIX) -> int:
        """As `Engine.open`; begins with no rows, since another session's were computed on features of its own."""
        self._network.open(session, max_rows)
        self._features.open(session)
        self._outputs[session] = RowList()
        return 0

    def close(self, session: int) -> None:  # noqa: D102
        self._network.close(session)
        self._features.close(session)
        self._outputs.pop(session, None)

    def give(self, session: int, first_position: int, rows: FeatureRows) -> None:  # noqa: D102
        self._features.give(session, first_position, rows)

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> Sequence[Logits]:
        """As `Engine.step`; rows that read the output of other rows of the plan are computed after them."""
        self._network.check(plan)
        # Runs return logits in the order of rows, so logit rows are sorted first.
        item_runs = [[*self._runs(replace(item, logit_rows=tuple(sorted(item.logit_rows))))] for item in plan.items]
        logits_of_items: list[list[Logits]] = [[] for _ in plan.items]
        for turn in range(max(map(len, item_runs))):
            places = [place for place, items in enumerate(item_runs) if turn < len(items)]
            outputs = self._compute([item_runs[place][turn] for place in places])
            for place, logits in zip(places, outputs, strict=True):
                logits_of_items[place].append(logits.copy())
        for item in plan.items:
            self._features.trim(item)
        return [
            np.concatenate(parts)[np.searchsorted(sorted(item.logit_rows), item.logit_rows)]
            for item, parts in zip(plan.items, logits_of_items, strict=True)
        ]

    def _compute(self, items: Sequence[StepItem]) -> Sequence[Logits]:
        for item in items:
            self._outputs[item.session].keep(item)
        distances = [self._distances(item) for item in items]
        features = torch.cat([self._input_features(item, each) for item, each in zip(items, distances, strict=True)])
        inputs = RowInputs(features, tuple(each for rows in distances for each in rows))
        outputs = self._network.compute(StepPlan(tuple(items)), inputs)
        row_features = iter(outputs.features)
        for item in items:
            for _ in item.token_ids:
                self._outputs[item.session].add(next(row_features))
        return outputs.logits

    def _runs(self, item: StepItem) -> Sequence[StepItem]:
        distances = self._distances(item)
        return [*runs(item, lambda row: distances[row] > 0)]

    def _distances(self, item: StepItem) -> list[int]:
        """The distances of new rows, as in `RowInputs`."""
        features = self._features[item.session]
        distances: list[int] = []
        for depth in depths(item):
            previous = item.trunk + depth - 2
            nearest = features.nearest(previous)
            in_reach = nearest != NOTHING and previous - nearest <= OWN_REACH
            distances.append(previous - nearest if in_reach else NOTHING)
        return distances

    def _input_features(self, item: StepItem, distances: Sequence[int]) -> torch.Tensor:  # [new rows, width]
        features = self._empty.repeat(len(distances), 1)
        target_rows = [row for row, each in enumerate(distances) if each == 0]
        if target_rows:
            depth = depths(item)
            features[target_rows] = self._features[item.session].gather(
                [item.trunk + depth[row] - 2 for row in target_rows]
            )
        for row, each in enumerate(distances):
            if each > 0:
                parent_features = self._outputs[item.session].parent(item, row)
                assert parent_features is not None, "a feature before it was given"
                features[row] = parent_features
        return features
