"""An engine of heads that look several tokens ahead of one feature of the target: Medusa's.

No row holds keys or values. A row reads the last feature before it; the distance to it decides which
head predicts what follows.

Medusa's heads: residual blocks over the target's last hidden state, each with its output (arXiv:2401.10774).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from paceline.drafters.heads.target_features import NOTHING, TargetFeatures
from paceline.engine.features import FeatureRows
from paceline.engine.interface import NO_PREFIX, EngineInfo, Logits, Prefix, StepItem, StepPlan
from paceline.engine.ledger import LedgerEngine, depths
from paceline.engine.transformer import ComputeThreads
from paceline.protocol.features import FINAL, FeatureNeed
from paceline.runtime.config import EngineSettings


class ResidualLayer(nn.Module):
    """x + SiLU(W x + b); the identity, as long as W and b are zeros (section 2.1.1)."""

    def __init__(self, hidden: int, *, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden, bias=bias)
        for weight in self.linear.parameters():
            nn.init.zeros_(weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[…, hidden] → […, hidden]."""
        return hidden + functional.silu(self.linear(hidden))


class MedusaHeads(nn.Module):
    """Head d predicts the token d + 2 positions after the feature, whatever lies between.

    Args:
        hidden: width of the target's hidden state.
        layers: residual layers of each head.
        outputs: each head's last matrix, hidden → logits; one module for all heads where they share it.
        bias: of the residual layers.
        ids: [k] the target's ids of the logits, where outputs have logits for some of them alone.
        vocab_size: the target's, where `ids` says which.
        logit_scale: factor of the logits.
    """

    need = FeatureNeed((FINAL,))
    ids: torch.Tensor | None

    def __init__(
        self,
        hidden: int,
        layers: int,
        outputs: Sequence[nn.Module],
        *,
        bias: bool = True,
        ids: torch.Tensor | None = None,
        vocab_size: int = 0,
        logit_scale: float = 1.0,
    ) -> None:
        super().__init__()
        heads = [nn.Sequential(*(ResidualLayer(hidden, bias=bias) for _ in range(layers))) for _ in outputs]
        self.blocks = nn.ModuleList(heads)
        self.outputs = nn.ModuleList(outputs)
        self.register_buffer("ids", ids, persistent=False)
        self._hidden, self._vocab_size, self._logit_scale = hidden, vocab_size, logit_scale

    @property
    def heads(self) -> int:
        """The number of heads."""
        return len(self.blocks)

    @property
    def empty_feature(self) -> torch.Tensor:
        """Zeros [hidden], of the dtype and on the device of features."""
        zeros: torch.Tensor = next(self.parameters()).new_zeros(self._hidden)
        return zeros

    def forward(self, features: torch.Tensor, head: int) -> torch.Tensor:
        """One head's own logits [n, width of its output] of features [n, hidden]."""
        logits: torch.Tensor = self.outputs[head](self.blocks[head](features))
        return logits * self._logit_scale

    def logits(self, head: int, features: torch.Tensor) -> torch.Tensor:
        """One head's logits [n, V or wider]; -inf for ids that it has none for."""
        own: torch.Tensor = self(features, head)
        if self.ids is None:
            return own
        wide = own.new_full((len(own), self._vocab_size), float("-inf"))
        wide[:, self.ids] = own
        return wide


@dataclass(frozen=True)
class _HeadQuery:
    """A distribution that rows need: of one head, for the feature at one position."""

    session: int
    origin: int
    head: int


@dataclass
class _HeadRows:
    """`answers`: logits of heads for the feature at `origin`."""

    origin: int = NOTHING
    answers: dict[_HeadQuery, NDArray[np.float32]] = field(default_factory=dict)


class LookaheadEngine(LedgerEngine[None]):
    """The heads as a `FeatureEngine`.

    A head runs when a row first needs it, for all sessions of the step at once. Its logits are kept for the session's
    later rows, so a round runs each head that its tree reaches once.
    """

    def __init__(self, network: MedusaHeads, info: EngineInfo, settings: EngineSettings) -> None:
        super().__init__(info, settings)
        self._network = network
        self._threads = ComputeThreads()
        empty = network.empty_feature
        self.need, self.feature_width, self.reach = network.need, len(empty), network.heads
        self._features = TargetFeatures(len(empty), len(empty), empty)
        self._sessions: dict[int, _HeadRows] = {}
        self._unknown = np.zeros(info.fingerprint.vocab_size, np.float32)

    def open(self, session: int, max_rows: int, prefix: Prefix = NO_PREFIX) -> int:
        """As `Engine.open`; begins with no rows, since they cost nothing and features are the session's own."""
        self._ledger.open(session, max_rows)
        self._features.open(session)
        self._sessions[session] = _HeadRows()
        return 0

    def close(self, session: int) -> None:  # noqa: D102
        self._ledger.close(session)
        self._features.close(session)
        self._sessions.pop(session, None)

    def give(self, session: int, first_position: int, rows: FeatureRows) -> None:  # noqa: D102
        self._features.give(session, first_position, rows)
        self._sessions[session].answers.clear()

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> Sequence[Logits]:  # noqa: D102
        self._ledger.check(plan)
        self._threads.bind()
        queries = [self._queries_of(item) for item in plan.items]
        self._ledger.apply(plan)
        answers = self._answer([each for row_queries in queries for each in row_queries if each is not None])
        for item in plan.items:
            self._features.trim(item)
        return [
            self._logits([self._unknown if each is None else answers[each] for each in row_queries])
            for row_queries in queries
        ]

    def _queries_of(self, item: StepItem) -> list[_HeadQuery | None]:
        """The queries of an item's logit rows; None: no feature is near enough."""
        levels = depths(item)
        return [self._query_at(item.session, item.trunk + levels[row] - 1) for row in item.logit_rows]

    def _query_at(self, session: int, position: int) -> _HeadQuery | None:
        origin = self._features[session].nearest(position - 1)
        head = position - 1 - origin
        if origin == NOTHING or head >= self._network.heads:
            return None
        return _HeadQuery(session, origin, head)

    def _answer(self, queries: Sequence[_HeadQuery]) -> dict[_HeadQuery, NDArray[np.float32]]:
        """The logits [V] of each query: those that are kept, and for all others one pass of each head."""
        answers: dict[_HeadQuery, NDArray[np.float32]] = {}
        by_head: dict[int, list[_HeadQuery]] = {}
        for each in dict.fromkeys(queries):
            logits = self._sessions[each.session].answers.get(each)
            if logits is None:
                by_head.setdefault(each.head, []).append(each)
            else:
                answers[each] = logits
        for head, head_queries in by_head.items():
            features = torch.cat([self._features[each.session].gather([each.origin]) for each in head_queries])
            rows = self._network.logits(head, features)
            on_host = rows[:, : len(self._unknown)].float().cpu().numpy()
            answers.update(zip(head_queries, on_host, strict=True))
        self._remember(answers)
        return answers

    def _remember(self, answers: dict[_HeadQuery, NDArray[np.float32]]) -> None:
        """Keep the logits for each session's latest feature: its tree needs them again."""
        for query, logits in answers.items():
            session = self._sessions[query.session]
            if query.origin > session.origin or not session.answers:
                session.origin, session.answers = query.origin, {}
            if query.origin == session.origin:
                session.answers[query] = logits

    def _logits(self, rows: Sequence[NDArray[np.float32]]) -> Logits:
        return np.stack(rows) if rows else np.empty((0, len(self._unknown)), np.float32)
