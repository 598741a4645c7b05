"""An engine of heads that look several tokens ahead of one feature of the target: Medusa's.

No row holds keys or values. A row reads the last feature before it; how far back that lies is which
head tells what follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.drafters.heads.given import NOTHING, GivenBySession
from paceline.drafters.heads.medusa import MedusaHeads
from paceline.engine.features import FeatureRows
from paceline.engine.interface import NO_PREFIX, EngineInfo, Logits, Prefix, StepItem, StepPlan
from paceline.engine.ledger import LedgerEngine, depths
from paceline.engine.transformer import ComputeThreads
from paceline.runtime.config import EngineSettings


@dataclass(frozen=True)
class _Asked:
    """A distribution that rows want: one head's, of one position's feature."""

    session: int
    origin: int
    head: int


@dataclass
class _HeadRows:
    """`told`: what heads said of the feature at `origin`."""

    origin: int = NOTHING
    told: dict[_Asked, NDArray[np.float32]] = field(default_factory=dict)


class LookaheadEngine(LedgerEngine[None]):
    """The heads as a `FeatureEngine`.

    A head is run when a row first asks for it, for all sessions of the step at once, and what it says is remembered
    for the session's later rows: so a round runs each head that its tree reaches once.
    """

    def __init__(self, network: MedusaHeads, info: EngineInfo, settings: EngineSettings) -> None:
        super().__init__(info, settings)
        self._network = network
        self._threads = ComputeThreads()
        empty = network.empty_feature
        self.need, self.feature_width, self.reach = network.need, len(empty), network.heads
        self._given = GivenBySession(len(empty), len(empty), empty)
        self._sessions: dict[int, _HeadRows] = {}
        self._unknown = np.zeros(info.fingerprint.vocab_size, np.float32)

    def open(self, session: int, max_rows: int, prefix: Prefix = NO_PREFIX) -> int:
        """As `Engine.open`; begins with no rows: they cost nothing, and features are the session's own."""
        self._ledger.open(session, max_rows)
        self._given.open(session)
        self._sessions[session] = _HeadRows()
        return 0

    def close(self, session: int) -> None:  # noqa: D102
        self._ledger.close(session)
        self._given.close(session)
        self._sessions.pop(session, None)

    def give(self, session: int, first_position: int, rows: FeatureRows) -> None:  # noqa: D102
        self._given.give(session, first_position, rows)
        self._sessions[session].told.clear()

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> Sequence[Logits]:  # noqa: D102
        self._ledger.check(plan)
        self._threads.bind()
        asked = [self._asked_by(item) for item in plan.items]
        self._ledger.apply(plan)
        told = self._tell([each for wants in asked for each in wants if each is not None])
        for item in plan.items:
            self._given.stepped(item)
        return [self._logits([self._unknown if each is None else told[each] for each in wants]) for wants in asked]

    def _asked_by(self, item: StepItem) -> list[_Asked | None]:
        """What the rows whose logits are wanted ask for; None: nothing can be known."""
        levels = depths(item)
        return [self._asked(item.session, item.trunk + levels[row] - 1) for row in item.logit_rows]

    def _asked(self, session: int, position: int) -> _Asked | None:
        origin = self._given[session].nearest(position - 1)
        head = position - 1 - origin
        if origin == NOTHING or head >= self._network.heads:
            return None
        return _Asked(session, origin, head)

    def _tell(self, asked: Sequence[_Asked]) -> dict[_Asked, NDArray[np.float32]]:
        """The logits [V] of each, from what was told before and from one pass of each head for all others."""
        told: dict[_Asked, NDArray[np.float32]] = {}
        by_head: dict[int, list[_Asked]] = {}
        for each in dict.fromkeys(asked):
            known = self._sessions[each.session].told.get(each)
            if known is None:
                by_head.setdefault(each.head, []).append(each)
            else:
                told[each] = known
        for head, wanted in by_head.items():
            features = torch.cat([self._given[each.session].at([each.origin]) for each in wanted])
            rows = self._network.logits(head, features)
            on_host = rows[:, : len(self._unknown)].float().cpu().numpy()
            told.update(zip(wanted, on_host, strict=True))
        self._remember(told)
        return told

    def _remember(self, told: dict[_Asked, NDArray[np.float32]]) -> None:
        """Keep what was said of each session's latest feature: its tree asks for it again."""
        for asked, logits in told.items():
            session = self._sessions[asked.session]
            if asked.origin > session.origin or not session.told:
                session.origin, session.told = asked.origin, {}
            if asked.origin == session.origin:
                session.told[asked] = logits

    def _logits(self, rows: Sequence[NDArray[np.float32]]) -> Logits:
        return np.stack(rows) if rows else np.empty((0, len(self._unknown)), np.float32)
