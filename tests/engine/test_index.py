"""Attention to keys that an index chooses: texts, equal scores, memory and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paceline.engine import index
from paceline.engine.index import IndexCall
from paceline.engine.interface import StepItem
from paceline.protocol.errors import Unsupported
from tests.engine import tiny
from tests.engine.families import CHOOSING, CHOSEN, CONTEXT, named
from tests.engine.test_families import SETTINGS, ServedFamily, loaded
from tests.engine.test_states import SETTINGS as LONG
from tests.engine.test_states import SPECS, check_texts, longer
from tests.engine.tiny import TOLERANCE, chain, step

IN_EVERY_RUN = (("DeepSeek-V3.2", "T 0.8"), ("GLM-5", "greedy"))


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        pytest.param(each.name, spec, marks=() if (each.name, spec) in IN_EVERY_RUN else pytest.mark.full)
        for each in CHOOSING
        for spec in SPECS
    ],
)
def test_texts_are_those_of_forward_passes(name: str, spec: str) -> None:
    model = tiny.random_model(longer(named(name)).config())
    plain = tiny.Plain(model)
    check_texts(ServedFamily(tiny.transformer(model, LONG), model, plain), SPECS[spec])


def check_equal_scores() -> None:
    """All scores are 0: which keys are chosen depends on their number and order alone."""
    model: Any = tiny.random_model(named("DeepSeek-V3.2").config())
    with pytest.MonkeyPatch.context() as unchecked:
        unchecked.setattr("paceline.engine.decoder.self_check", lambda engine, reference: None)
        engine = tiny.transformer(model, SETTINGS)
    for layer in model.model.layers:
        layer.self_attn.indexer.weights_proj.weight.data.zero_()
    text, tree = [token * 7 % tiny.VOCAB for token in range(3 * CHOSEN)], (1, 1, 5, 9, 9)
    path = [0, 2, 3]
    engine.open(1, CONTEXT)
    engine.open(2, CONTEXT)
    step(engine, chain(1, 0, text))
    tree_rows = step(engine, StepItem(1, len(text), tree, (-1, -1, 0, 2, 2), logit_rows=tuple(range(5))))[path]
    for start, token in enumerate(text):
        step(engine, chain(2, start, [token]))
    decoded = [step(engine, chain(2, len(text) + i, [tree[row]]))[0].copy() for i, row in enumerate(path)]
    np.testing.assert_allclose(tree_rows, decoded, atol=TOLERANCE, rtol=0)
    chained = step(engine, chain(2, len(text), [tree[row] for row in path]))
    np.testing.assert_allclose(chained, decoded, atol=TOLERANCE, rtol=0)


def test_a_verified_row_chooses_as_a_decoded_one_among_equal_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    check_equal_scores()

    def at_once(call: IndexCall, low: int, keys: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        *inputs, cos, sin = [each[:, low : low + len(visible)] for each in call.rows]
        places = call.forward(*inputs, (cos, sin), visible[None], None, cache=index._IndexCache(keys))[0]
        others = ~torch.zeros_like(visible).scatter(1, places.long(), value=True)
        return torch.zeros(visible.shape).masked_fill_(others | ~visible, float("-inf"))

    monkeypatch.setattr(IndexCall, "mask", at_once)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_equal_scores()


def test_index_keys_are_part_of_the_budget() -> None:
    by_layer = [2 * (4 * (16 + 12) + 16) * 4, (4 * (16 + 12) + 16 + 4 * (16 + 12)) * 4]
    for name, row_bytes in zip(("DeepSeek-V3.2", "GLM-5"), by_layer, strict=True):
        engine = loaded(named(name)).engine
        assert engine.attention.shape.row_bytes == row_bytes
        assert engine.info.max_kv_rows == SETTINGS.kv_bytes // row_bytes


def test_layers_without_the_index_that_their_type_promises_are_refused() -> None:
    """They would be served as another model."""
    model: Any = tiny.random_model(named("DeepSeek-V3, R1, Kimi K2").config())
    model.config.layer_types = ["indexed_attention"] * 2
    with pytest.raises(Unsupported, match="layers of type indexed_attention, of which it has none"):
        tiny.build(model, SETTINGS)
