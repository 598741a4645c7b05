"""A network that goes on from its own features and sees all rows before, and what its rows are by definition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from paceline.drafters.heads.own_features import OWN_REACH, RowInputs, RowList, RowOutputs
from paceline.drafters.heads.target_features import NOTHING
from paceline.engine.interface import NO_PREFIX, EngineInfo, Logits, Prefix, StepPlan
from paceline.engine.ledger import Ledger
from paceline.protocol.features import FeatureNeed
from paceline.protocol.handshake import Fingerprint
from paceline.runtime.config import EngineSettings

VOCAB, WIDTH, NEED_WIDTH = 11, 4, 8


class SumNetwork:
    """A row's own feature is tanh(W · (feature read) + token); its logits are those of a fading sum over its path."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self._mix, self._head = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, VOCAB)
        self._fuse = torch.randn(NEED_WIDTH, WIDTH)
        self.info = EngineInfo(Fingerprint("sum", "table", VOCAB, "sum"), 4096, 1 << 16)
        self._ledger: Ledger[None] = Ledger(self.info, EngineSettings(max_num_seqs=8))
        self.need, self.feature_width, self.empty_feature = FeatureNeed((0, 1)), NEED_WIDTH, torch.zeros(WIDTH)
        self._sums: dict[int, RowList[torch.Tensor]] = {}
        self.steps = 0

    @property
    def kv_rows(self) -> int:
        return self._ledger.kv_rows

    def project(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self._fuse

    def open(self, session: int, max_rows: int, prefix: Prefix = NO_PREFIX) -> int:
        self._ledger.open(session, max_rows, prefix)
        self._sums[session] = RowList()
        return 0

    def close(self, session: int) -> None:
        self._ledger.close(session)

    def check(self, plan: StepPlan) -> None:
        self._ledger.check(plan)

    def row(self, token: int, feature: torch.Tensor) -> torch.Tensor:
        return torch.tanh(feature @ self._mix + token / VOCAB)

    def compute(self, plan: StepPlan, inputs: RowInputs) -> RowOutputs:
        self.steps += 1
        self._ledger.check(plan)
        self._ledger.apply(plan)
        tokens = [token for item in plan.items for token in item.token_ids]
        own = torch.stack([self.row(*each) for each in zip(tokens, inputs.features, strict=True)])
        logits, low = [], 0
        for item in plan.items:
            sums = self._sums[item.session]
            sums.keep(item)
            found: list[torch.Tensor] = []
            for row in range(len(item.token_ids)):
                above = sums.parent(item, row)
                found.append(own[low + row] if above is None else above / 2 + own[low + row])
                sums.add(found[-1])
            logits.append((torch.stack(found)[[*item.logit_rows]] @ self._head).numpy())
            low += len(item.token_ids)
        return RowOutputs(logits, own)

    def by_definition(self, tokens: Sequence[int], given: Mapping[int, np.ndarray]) -> Logits:
        """Logits [tokens, V] of a path."""
        known, own, total, rows = NOTHING, torch.zeros(WIDTH), torch.zeros(WIDTH), []
        for position, token in enumerate(tokens):
            before = position - 1
            if before in given:
                known, feature = before, self.project(torch.tensor(given[before]))
            else:
                feature = own if known != NOTHING and before - known <= OWN_REACH else torch.zeros(WIDTH)
            own = self.row(token, feature)
            total = total / 2 + own
            rows.append(total @ self._head)
        return torch.stack(rows).numpy()


def sum_features(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, NEED_WIDTH)).astype(np.float32)
