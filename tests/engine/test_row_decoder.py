"""Compiled steps give the bits that the layers give, one by one or side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.engine.cpu.row_decoder import RowDecoder
from paceline.engine.cpu.row_products import has_wide_vectors
from paceline.engine.decoder import build_engine
from paceline.engine.interface import StepItem, StepPlan
from paceline.engine.transformer import TransformerEngine
from paceline.models.tokenizer import TableTokenizer
from paceline.protocol.errors import Unsupported
from paceline.protocol.proposal import ROOT
from paceline.runtime.config import EngineSettings
from tests.engine import tiny

pytestmark = pytest.mark.skipif(not has_wide_vectors(), reason="this CPU has no vectors of 512 bits")

Rows = NDArray[np.float32]
COMPILED = ("llama", "qwen2")
PROMPTS = ((5, 9, 2, 77, 31, 8), (3, 3, 4), tuple(range(40)))
TREE = StepItem(0, 6, (11, 12, 13, 14, 15), (ROOT, ROOT, 0, 1, 0), logit_rows=(0, 1, 2, 3, 4))
CHAIN = StepItem(1, 3, tuple(range(20, 36)), logit_rows=tuple(range(16)))
ALONE = StepItem(2, 40, (50,), logit_rows=(0,))


def engine_of(family: str, threads: int = 2) -> TransformerEngine:
    model = tiny.random_model(tiny.FAMILIES[family]())
    engine = build_engine(model, TableTokenizer(tiny.VOCAB, None), EngineSettings(threads=threads), "tiny")
    assert isinstance(engine, TransformerEngine)
    return engine


def logits_of(engine: TransformerEngine, steps: Sequence[Sequence[StepItem]]) -> list[Rows]:
    """Of the items of all steps, in order, behind the three prompts."""
    found: list[Rows] = []
    for session, prompt in enumerate(PROMPTS):
        engine.open(session, 80)
        engine.step(StepPlan((StepItem(session, 0, prompt),)))
    for items in steps:
        found += [logits.copy() for logits in engine.step(StepPlan(tuple(items)))]
    for session in range(len(PROMPTS)):
        engine.close(session)
    return found


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_known_models_are_compiled_and_no_others(family: str) -> None:
    assert isinstance(engine_of(family).row_decoder, RowDecoder) == (family in COMPILED)


@pytest.mark.parametrize("family", COMPILED)
def test_bits_are_those_of_the_layers(family: str) -> None:
    engine = engine_of(family)
    steps = ((TREE, CHAIN, ALONE), (StepItem(2, 41, (1, 2), logit_rows=(1,)),))
    compiled = logits_of(engine, steps)
    engine.row_decoder = None
    for one, other in zip(compiled, logits_of(engine, steps), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("family", COMPILED)
def test_bits_do_not_depend_on_threads_or_on_the_rows_and_sessions_beside(family: str) -> None:
    together = logits_of(engine_of(family, threads=3), ((TREE, CHAIN, ALONE),))
    engine = engine_of(family, threads=1)
    for item, rows in zip((TREE, CHAIN, ALONE), together, strict=True):
        np.testing.assert_array_equal(logits_of(engine, ((item,),))[0], rows)
    one_by_one = [(StepItem(1, 3 + row, (20 + row,), logit_rows=(0,)),) for row in range(16)]
    np.testing.assert_array_equal(np.concatenate(logits_of(engine, one_by_one)), together[1])


@pytest.mark.parametrize("family", COMPILED)
def test_bits_do_not_depend_on_how_a_text_is_cut_into_steps(family: str) -> None:
    engine, text = engine_of(family), tuple(range(60))
    found = []
    for cuts in ((60,), (1,) * 60, (13, 20, 1, 26)):
        engine.open(7, 60)
        start, rows = 0, []
        for size in cuts:
            item = StepItem(7, start, text[start : start + size], logit_rows=tuple(range(size)))
            rows.append(engine.step(StepPlan((item,)))[0].copy())
            start += size
        engine.close(7)
        found.append(np.concatenate(rows))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_no_rotary_module_is_asked_for_positions_that_no_session_reaches() -> None:
    """A module whose frequencies move past the trained length would give other angles for all of them."""
    model, trained = tiny.random_model(tiny.llama()), 40
    model.model.rotary_emb.register_forward_pre_hook(_refuse_beyond(trained), with_kwargs=True)
    settings = EngineSettings(threads=1, max_model_len=trained)
    engine = build_engine(model, TableTokenizer(tiny.VOCAB, None), settings, "tiny")
    engine.open(1, trained)
    engine.step(StepPlan((StepItem(1, 0, tuple(range(33))),)))
    engine.step(StepPlan((StepItem(1, 33, tuple(range(7))),)))


def _refuse_beyond(trained: int) -> Callable[..., None]:
    def hook(module: object, arguments: Sequence[torch.Tensor], named: Mapping[str, torch.Tensor]) -> None:
        positions = named["position_ids"] if "position_ids" in named else arguments[1]
        assert int(positions.max()) < trained, "asked past the trained length"

    return hook


def test_logits_are_wanted_of_some_rows_or_of_none() -> None:
    engine = engine_of("llama")
    some = StepItem(1, 3, CHAIN.token_ids, logit_rows=(2, 15))
    (every,), (few,) = logits_of(engine, ((CHAIN,),)), logits_of(engine, ((some,),))
    np.testing.assert_array_equal(few, every[[2, 15]])
    assert logits_of(engine, ((StepItem(1, 3, CHAIN.token_ids),),))[0].shape == (0, tiny.VOCAB)


def test_a_compiled_step_that_is_wrong_is_refused_at_start_up(monkeypatch: pytest.MonkeyPatch) -> None:
    right = RowDecoder.logits

    def wrong(self: RowDecoder, *arguments: object) -> torch.Tensor:
        return right(self, *arguments).roll(1, dims=1)  # type: ignore[arg-type]

    monkeypatch.setattr(RowDecoder, "logits", wrong)
    with pytest.raises(Unsupported, match="packed logits differ from its own"):
        engine_of("llama")
