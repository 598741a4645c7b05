"""Engines whose heads look several tokens ahead of one feature of the target: Medusa, Hydra.

No row holds keys or values. A row reads the last given feature before it and, where the network wants them, the
tokens since; how far that feature lies back is which head tells what follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.engine.features import FeatureRows
from paceline.engine.interface import NO_PREFIX, EngineInfo, Logits, Prefix, StepItem, StepPlan
from paceline.engine.ledger import LedgerEngine, depths
from paceline.engine.transformer import ComputeThreads
from paceline.heads.given import NOTHING, GivenBySession
from paceline.heads.paths import RowList
from paceline.protocol.features import FeatureNeed
from paceline.runtime.config import EngineSettings

Tokens = tuple[int, ...]


class LookaheadNetwork(Protocol):
    """Heads 0 … n - 1: head d tells the token d + 2 positions behind the feature that it reads."""

    @property
    def need(self) -> FeatureNeed:
        """Constant; what the target must send."""

    @property
    def empty_feature(self) -> torch.Tensor:
        """Zeros [width], of the dtype and on the device of features."""

    @property
    def heads(self) -> int:
        """Constant; how many there are."""

    @property
    def reads_tokens(self) -> bool:
        """Constant; whether logits depend on the tokens between the feature and what follows."""

    def logits(self, head: int, features: torch.Tensor, paths: Sequence[Tokens]) -> torch.Tensor:
        """What one head says [n, V or wider] of features [n, width] and the `head + 1` tokens behind each."""


@dataclass(frozen=True)
class _Asked:
    """A distribution that rows want: one head's, of one position's feature, behind some tokens if it reads them."""

    session: int
    origin: int
    head: int
    path: Tokens = ()


@dataclass
class _HeadRows:
    """`rows`: the last tokens of each row's path. `told`: what heads said of the feature at `origin`."""

    rows: RowList[Tokens] = field(default_factory=RowList)
    origin: int = NOTHING
    told: dict[_Asked, NDArray[np.float32]] = field(default_factory=dict)


class LookaheadEngine(LedgerEngine[None]):
    """Such heads as a `FeatureEngine`.

    A head is run when a row first asks for it, for all sessions of the step at once, and what heads that read no
    tokens say is remembered for the session's later rows: so a round runs each head that its tree reaches once.
    """

    def __init__(self, network: LookaheadNetwork, info: EngineInfo, settings: EngineSettings) -> None:
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

    def forget_features(self, session: int, position: int) -> None:  # noqa: D102
        self._given[session].forget(position)
        self._sessions[session].told.clear()

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> Sequence[Logits]:  # noqa: D102
        self._ledger.check(plan)
        self._threads.bind()
        asked = [self._take(item) for item in plan.items]
        self._ledger.apply(plan)
        told = self._tell([each for wants in asked for each in wants if each is not None])
        for item in plan.items:
            self._given.stepped(item)
        return [self._logits([self._unknown if each is None else told[each] for each in wants]) for wants in asked]

    def _take(self, item: StepItem) -> list[_Asked | None]:
        """Take a session's rows in; what those whose logits are wanted ask for, None: nothing can be known."""
        session = self._sessions[item.session]
        session.rows.keep(item)
        found: list[_Asked | None] = []
        for row, (token, depth) in enumerate(zip(item.token_ids, depths(item), strict=True)):
            path = (*(session.rows.parent(item, row) or ()), token)[-self.reach :]
            session.rows.add(path)
            found.append(self._asked(item.session, item.trunk + depth - 1, path))
        return [found[row] for row in item.logit_rows]

    def _asked(self, session: int, position: int, path: Tokens) -> _Asked | None:
        origin = self._given[session].nearest(position - 1)
        head = position - 1 - origin
        if origin == NOTHING or head >= self._network.heads:
            return None
        return _Asked(session, origin, head, path[-head - 1 :] if self._network.reads_tokens else ())

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
            rows = self._network.logits(head, features, [each.path for each in wanted])
            on_host = rows[:, : len(self._unknown)].float().cpu().numpy()
            told.update(zip(wanted, on_host, strict=True))
        if not self._network.reads_tokens:
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
