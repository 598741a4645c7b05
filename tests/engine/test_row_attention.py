"""Attention of few rows against softmax written down in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.engine.cpu.row_attention import FEW_KEYS, RowAttention, is_few
from paceline.engine.forward import AttentionCall
from paceline.engine.interface import StepItem
from paceline.engine.kv import KVShape, LayerShape, SessionKV
from paceline.protocol.proposal import ROOT

LAYERS = 2
CAPACITY = 40
CHAIN = StepItem(1, 5, (7, 8, 9))
ALONE = StepItem(2, 17, (3,))
TREE = StepItem(3, 6, (1, 2, 3), (ROOT, ROOT, 0, 1, 0), trunk_length=4)
"""Rows 4 and 5 are kept and branch; the new ones hang from row 4, row 5 and row 4."""
SEEN = {
    1: [[*range(6)], [*range(7)], [*range(8)]],
    2: [[*range(18)]],
    3: [[*range(4), 4, 6], [*range(4), 5, 7], [*range(4), 4, 8]],
}


ITEMS, LOWS, ROWS = (CHAIN, ALONE, TREE), (1, 5, 8), 12
"""A step, with other rows of the step before, between and behind."""


class Step:
    def __init__(self, heads: int, kv_heads: int, head_dim: int, scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(head_dim)
        layer = LayerShape(kv_heads, head_dim, head_dim, heads // kv_heads)
        shape = KVShape((layer,) * LAYERS, torch.float32, torch.device("cpu"))
        self.kv = [SessionKV(shape, CAPACITY + index) for index in range(3)]
        for session in self.kv:
            for layer_index in range(LAYERS):
                session.keys(layer_index).normal_(generator=generator)
                session.values(layer_index).normal_(generator=generator)
        # As a fused layer hands them over: parts of one tensor, heads behind rows.
        joined = scale * torch.randn(1, ROWS, heads + 2 * kv_heads, head_dim, generator=generator)
        self.query, self.key, self.value = joined.transpose(1, 2).split([heads, kv_heads, kv_heads], dim=1)

    def attend(self, scaling: float | None = None) -> torch.Tensor:
        plan = RowAttention.from_items(list(zip(ITEMS, self.kv, LOWS, strict=True)))
        out = torch.full((1, ROWS, self.query.shape[1], self.query.shape[3]), 99.0)
        module: Any = SimpleNamespace(layer_idx=1)
        plan.attend(AttentionCall(module, self.query, self.key, self.value, scaling), out)
        return out[0]


def softmax_over(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> NDArray[np.float64]:
    scores = (keys.double() @ query.double()).numpy() * scale
    weights = np.exp(scores - scores.max())
    found: NDArray[np.float64] = weights @ values.double().numpy() / weights.sum()
    return found


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "scale"), [(9, 3, 64, 1.0), (4, 4, 128, 30.0), (4, 2, 24, 1.0), (3, 1, 8, 30.0)]
)
def test_every_row_attends_to_the_keys_it_sees(heads: int, kv_heads: int, head_dim: int, scale: float) -> None:
    step, scaling = Step(heads, kv_heads, head_dim, scale), 2 * head_dim**-0.5
    out = step.attend(scaling)
    assert Step(heads, kv_heads, head_dim, 1e4).attend().isfinite().all()
    for item, kv, low in zip(ITEMS, step.kv, LOWS, strict=True):
        held = torch.stack((kv.keys(1), kv.values(1)))
        for row, seen in enumerate(SEEN[item.session]):
            for head in range(heads):
                keys, values = held[:, head // (heads // kv_heads), seen]
                expected = softmax_over(step.query[0, head, low + row], keys, values, scaling)
                np.testing.assert_allclose(out[low + row, head].numpy(), expected, rtol=3e-5, atol=3e-5 * scale)
    assert (out[[0, 4, 6, 7]] == 99.0).all(), "rows of nobody"


def test_a_broken_key_gives_no_number_to_its_own_rows_alone() -> None:
    step = Step(4, 2, 16)
    step.kv[0].keys(1)[:, 6] = float("nan")
    step.kv[0].keys(1)[:, 2] = float("nan")
    out = step.attend()
    assert out[1:4].isnan().all()
    assert not out[4:].isnan().any()


def test_which_items_are_few() -> None:
    most = FEW_KEYS // 4 - 4
    for base, rows, few in ((100_000, 1, True), (0, 1, True), (0, 2, True), (most, 4, True), (most + 1, 4, False)):
        item = StepItem(1, base, (1,) * rows)
        assert is_few(item, FEW_KEYS) is few
        assert not is_few(item, 0)
