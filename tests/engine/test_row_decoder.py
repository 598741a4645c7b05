"""Compiled steps give the bits that the layers give, one by one or side by side."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.engine.cpu.row_decoder import RowDecoder
from paceline.engine.cpu.row_products import has_wide_vectors
from paceline.engine.interface import StepItem, StepPlan
from paceline.engine.transformer import TransformerEngine
from paceline.protocol.errors import Unsupported
from paceline.protocol.proposal import ROOT
from tests.engine import tiny
from tests.engine.tiny import chain, step

pytestmark = pytest.mark.skipif(not has_wide_vectors(), reason="this CPU has no vectors of 512 bits")

Rows = NDArray[np.float32]
COMPILED = ("llama", "qwen2")
PROMPTS = ((5, 9, 2, 77, 31, 8), (3, 3, 4), tuple(range(40)))
TREE = StepItem(0, 6, (11, 12, 13, 14, 15), (ROOT, ROOT, 0, 1, 0), logit_rows=(0, 1, 2, 3, 4))
CHAIN = chain(1, 3, range(20, 36))
ALONE = chain(2, 40, (50,))
SERVED = (*COMPILED, "qwen coder in eight bits")


def engine_of(name: str, threads: int = 2) -> TransformerEngine:
    if name in tiny.FAMILIES:
        return tiny.transformer(tiny.random_model(tiny.FAMILIES[name]()), threads=threads)
    coder = tiny.biased(tiny.random_model(tiny.qwen_coder()))
    return tiny.transformer(coder, threads=threads, quantization="int8")


def logits_of(engine: TransformerEngine, steps: Sequence[Sequence[StepItem]]) -> list[Rows]:
    """Of the items of all steps, in order, behind the three prompts."""
    rows: list[Rows] = []
    for session, prompt in enumerate(PROMPTS):
        engine.open(session, 80)
        step(engine, StepItem(session, 0, prompt))
    for items in steps:
        rows += [logits.copy() for logits in engine.step(StepPlan(tuple(items)))]
    for session in range(len(PROMPTS)):
        engine.close(session)
    return rows


@pytest.mark.parametrize("family", SERVED)
def test_bits_are_those_of_the_layers(family: str) -> None:
    engine = engine_of(family)
    assert isinstance(engine.row_decoder, RowDecoder)
    steps = ((TREE, CHAIN, ALONE), (StepItem(2, 41, (1, 2), logit_rows=(1,)),))
    compiled = logits_of(engine, steps)
    engine.row_decoder = None
    for one, other in zip(compiled, logits_of(engine, steps), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("family", SERVED)
def test_bits_do_not_depend_on_threads_or_on_the_rows_and_sessions_beside(family: str) -> None:
    together = logits_of(engine_of(family, threads=3), ((TREE, CHAIN, ALONE),))
    engine = engine_of(family, threads=1)
    for item, rows in zip((TREE, CHAIN, ALONE), together, strict=True):
        np.testing.assert_array_equal(logits_of(engine, ((item,),))[0], rows)
    one_by_one = [(chain(1, 3 + row, (20 + row,)),) for row in range(16)]
    np.testing.assert_array_equal(np.concatenate(logits_of(engine, one_by_one)), together[1])


def test_bits_do_not_depend_on_how_a_text_is_cut_into_steps() -> None:
    engine, text = engine_of("qwen2"), tuple(range(60))
    whole = tiny.read(engine, text)
    for cuts in ((1,) * 60, (13, 20, 1, 26)):
        engine.open(7, 60)
        for start, end in itertools.pairwise((0, *itertools.accumulate(cuts))):
            np.testing.assert_array_equal(step(engine, chain(7, start, text[start:end])), whole[start:end])
        engine.close(7)


def test_no_rotary_module_is_asked_for_positions_that_no_session_reaches() -> None:
    """A module whose frequencies move past the trained length would give other angles for all of them."""
    model, trained = tiny.random_model(tiny.llama()), 40

    def refuse_beyond(_: object, arguments: Sequence[torch.Tensor], named: Mapping[str, torch.Tensor]) -> None:
        positions = named["position_ids"] if "position_ids" in named else arguments[1]
        assert int(positions.max()) < trained, "asked past the trained length"

    model.model.rotary_emb.register_forward_pre_hook(refuse_beyond, with_kwargs=True)
    engine = tiny.transformer(model, max_model_len=trained)
    engine.open(1, trained)
    step(engine, chain(1, 0, range(33)))
    step(engine, chain(1, 33, range(7)))


def test_a_compiled_step_that_is_wrong_is_refused_at_start_up(monkeypatch: pytest.MonkeyPatch) -> None:
    right = RowDecoder.logits
    monkeypatch.setattr(RowDecoder, "logits", lambda *arguments: right(*arguments).roll(1, dims=1))
    with pytest.raises(Unsupported, match="packed logits differ from its own"):
        engine_of("llama")
