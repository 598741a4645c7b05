"""Medusa's heads as an engine: every row's logits are those of a direct computation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.drafters.heads.lookahead import LookaheadEngine, MedusaHeads
from paceline.drafters.heads.target_features import KEPT_POSITIONS, SessionFeatures
from paceline.engine.interface import EngineInfo, Logits, StepItem, StepPlan
from paceline.protocol.errors import InvalidInput
from paceline.protocol.handshake import Fingerprint
from paceline.runtime.config import EngineSettings
from tests.drafters.heads.lookahead_files import HEADS, HIDDEN, Tensors, medusa_says, own_tensors
from tests.engine.tiny import VOCAB, chain, step

TOKENS = (3, 1, 4, 1, 5, 9, 2, 6)
Given = Mapping[int, np.ndarray]
Says = Callable[[int, torch.Tensor], torch.Tensor]


def features(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, HIDDEN)).astype(np.float32)


def _output(weight: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(HIDDEN, VOCAB, bias=False)
    linear.load_state_dict({"weight": weight})
    return linear


def medusa() -> tuple[MedusaHeads, Says]:
    tensors: Tensors = own_tensors()
    network = MedusaHeads(HIDDEN, 2, [_output(tensors[f"{head}.2.weight"]) for head in range(HEADS)])
    layers = {f"blocks.{name}": tensor for name, tensor in tensors.items() if "linear" in name}
    network.load_state_dict(layers, strict=False)
    return network, lambda head, feature: medusa_says(tensors, head, feature)


class CountedHeads:
    """Passes on to a network, and notes which head was run for how many rows."""

    def __init__(self, inner: MedusaHeads) -> None:
        self._inner = inner
        self.need, self.empty_feature, self.heads = inner.need, inner.empty_feature, inner.heads
        self.runs: list[tuple[int, int]] = []

    def logits(self, head: int, features: torch.Tensor) -> torch.Tensor:
        self.runs.append((head, len(features)))
        return self._inner.logits(head, features)


def engine_of(network: Any) -> LookaheadEngine:
    info = EngineInfo(Fingerprint("heads", "table", VOCAB, "heads"), 4096, 1 << 14)
    engine = LookaheadEngine(network, info, EngineSettings(threads=1, max_num_seqs=8))
    engine.open(1, 1024)
    engine.open(2, 1024)
    return engine


def by_definition(says: Says, path: Sequence[int], given: Given) -> np.ndarray:
    """Logits [V] after a path."""
    before = len(path) - 2
    origin = max((each for each in given if each <= before), default=None)
    if origin is None or before - origin >= HEADS:
        return np.zeros(VOCAB, np.float32)
    head = before - origin
    feature = torch.from_numpy(given[origin])
    return says(head, feature).detach().numpy()


def assert_rows(rows: Logits, right: Sequence[np.ndarray]) -> None:
    np.testing.assert_allclose(rows, np.stack(right), rtol=1e-4, atol=1e-5)


def test_tree_rollback_and_replaced() -> None:
    network, says = medusa()
    engine = engine_of(network)
    rows = features(6)
    given = dict(enumerate(rows[:3]))
    engine.give(1, 0, rows[:3])
    step(engine, chain(1, 0, TOKENS[:4]))
    paths = [(5,), (5, 7), (6,), (6, 8)]
    item = StepItem(1, 4, (5, 7, 6, 8), parents=(-1, 0, -1, 2), logit_rows=(0, 1, 2, 3))
    assert_rows(step(engine, item), [by_definition(says, (*TOKENS[:4], *path), given) for path in paths])
    # The second branch is committed; its features come, and the rows that lacked them are computed again.
    engine.give(1, 3, rows[3:6])
    committed = (*TOKENS[:4], 6, 8, 2)
    kept = StepItem(1, 5, (8, 2), kept_rows=(6,), logit_rows=(0, 1))
    given = dict(enumerate(rows))
    assert_rows(step(engine, kept), [by_definition(says, committed[: end + 1], given) for end in (5, 6)])
    replaced = features(1, seed=5)
    engine.give(1, 5, replaced)
    assert_rows(step(engine, chain(1, 6, committed[6:])), [by_definition(says, committed, given | {5: replaced[0]})])


def test_features_shifted_by_one_are_told() -> None:
    network, says = medusa()
    engine = engine_of(network)
    rows = features(8)
    engine.give(1, 1, rows[:7])  # the bug: position p is given what the target computed at p - 1
    shifted = step(engine, chain(1, 0, TOKENS))
    right = np.stack([by_definition(says, TOKENS[: end + 1], dict(enumerate(rows))) for end in range(8)])
    assert not np.isclose(shifted[1:], right[1:], atol=1e-3).all(axis=1).any()


def test_sessions_share_passes_and_remember_what_medusa_said() -> None:
    network, says = medusa()
    counted = CountedHeads(network)
    engine = engine_of(counted)
    for session in (1, 2):
        engine.give(session, 0, features(2, session))
    plan = StepPlan(tuple(chain(session, 0, TOKENS[:3]) for session in (1, 2)))
    engine.step(plan)
    assert counted.runs == [(0, 4)], "heads of all sessions in one pass; nothing is known of position 0"
    counted.runs.clear()
    # Two levels of a tree: three nodes of one depth ask one head once, and a later step not again.
    tree = StepItem(1, 3, (5, 6, 7, 8), parents=(-1, -1, 0, 1), logit_rows=(0, 1, 2, 3))
    found = step(engine, tree)
    assert counted.runs == [(1, 1), (2, 1)]
    step(engine, chain(1, 3, (9,)))
    assert counted.runs == [(1, 1), (2, 1)]
    given = dict(enumerate(features(2, 1)))
    assert_rows(found[:1], [by_definition(says, (*TOKENS[:3], 5), given)])


def test_close_frees_and_width_is_checked() -> None:
    engine = engine_of(medusa()[0])
    with pytest.raises(InvalidInput, match=r"features shape"):
        engine.give(1, 0, np.zeros((1, HIDDEN + 1), np.float32))
    engine.close(1)
    engine.close(2)
    assert engine.kv_rows == 0


def test_features_far_behind_are_dropped() -> None:
    given = SessionFeatures(1, torch.zeros(1))
    rows = torch.arange(2000.0)[:, None]
    given.put(0, rows)
    given.drop_before(1900 - KEPT_POSITIONS)
    assert len(given._rows) < 2000 - 1500
    assert given.nearest(1999) == 1999
    assert not given.has(1500)
    given.put(1995, rows[1995:1998] + 1)
    assert given.gather([1994, 1996, 1999]).flatten().tolist() == [1994.0, 1997.0, 1999.0]
