"""Mixtures of experts: bits that nobody's company changes, and routers that read their weights themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.engine.cpu.row_products import has_wide_vectors
from paceline.engine.decoder import round_linears
from paceline.engine.interface import Prefix, StepItem, StepPlan
from paceline.protocol.errors import Unsupported
from tests.engine import tiny
from tests.engine.families import CONTEXT, SERVED, Family, named
from tests.engine.test_families import PROMPT, built, chain_of, sampled, speculated, tree_of

NAMES = ("Hunyuan A13B", "Mixtral", "Qwen 3 MoE", "GLM-4.5", "MiniMax-M2", "Granite MoE")
"""Families whose layers have experts, and attention that reproducible mode knows."""
MIXTURES = [
    pytest.param(family, id=family.name, marks=() if family.core else pytest.mark.full)
    for family in SERVED
    if family.name in NAMES
]
HUNYUAN = named("Hunyuan A13B")
ROWS = len(PROMPT)


@pytest.mark.parametrize("family", MIXTURES)
def test_reproducible_experts_give_the_plain_text(family: Family) -> None:
    plain, engine = tiny.Plain(tiny.random_model(family.config())), built(family, reproducible=True)
    text = sampled(plain)
    for propose in (tree_of, chain_of):
        assert speculated(engine, text, propose) == text


def test_no_company_changes_a_bit_of_what_experts_yield() -> None:
    engine = built(HUNYUAN, reproducible=True)
    found = []
    for company in (0, 1, 11):
        engine.open(1, CONTEXT, Prefix(prompt_rows=ROWS))
        engine.step(StepPlan((StepItem(1, 0, PROMPT),)))
        others = []
        for session in range(2, 2 + company):
            engine.open(session, CONTEXT, Prefix(prompt_rows=1))
            others.append(StepItem(session, 0, (session * 7 % tiny.VOCAB,)))
        item = StepItem(1, ROWS, (33, 44), logit_rows=(0, 1))
        logits = engine.step(StepPlan((*others, item)))[-1]
        found.append(logits.copy())
        for session in range(1, 2 + company):
            engine.close(session)
    assert all(np.array_equal(found[0], each) for each in found[1:])


def test_experts_on_all_the_rows_that_chose_them_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.engine.decoder.tile_experts", lambda model: None)
    with pytest.raises(Unsupported, match="one row a step and a whole round give different bits"):
        built(HUNYUAN, reproducible=True)


@pytest.mark.skipif(not has_wide_vectors(), reason="this CPU has no vectors of 512 bits")
@pytest.mark.parametrize("settings", [{"dtype": "fast"}, {"quantization": "int8"}], ids=str)
def test_routers_that_read_weights_are_served_in_eight_bits(settings: dict[str, Any]) -> None:
    model = tiny.random_model(HUNYUAN.config())
    round_linears(model)
    text = sampled(tiny.Plain(model))
    assert speculated(built(HUNYUAN, **settings), text, tree_of) == text
