"""Recurrent layers: texts that are target-only's and transformers' own, bits, bounds, memory and refusals."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from draft_service.drafters.tree import DraftTree
from paceline.engine import mixers
from paceline.engine.blocks import BLOCK_ROWS
from paceline.engine.cpu.row_products import has_wide_vectors
from paceline.engine.interface import Engine, Prefix, StepItem, StepPlan
from paceline.engine.mixers import WINDOW
from paceline.engine.vocabulary.engine import TranslatedEngine
from paceline.engine.weights import load_decoder
from paceline.models.resolve import resolve
from paceline.protocol.errors import InvalidInput, Overloaded, PrefixMismatch, Unsupported
from paceline.protocol.proposal import Proposal
from paceline.protocol.sampling import SamplingParams
from paceline.protocol.session import SessionSpec
from paceline.runtime.config import EngineSettings
from tests.engine import tiny
from tests.engine.families import STATEFUL, Family, named
from tests.engine.test_families import PROMPT, SPEC, ServedFamily, chain_of, sampled, speculated, tree_of
from tests.engine.test_growth import check_growth
from tests.engine.tiny import chain, step

TOKENS, DIFFERENT = 64, 30
LENGTH = len(PROMPT) + TOKENS
CONTEXT = 512
SETTINGS = EngineSettings(threads=1, kv_bytes=1 << 24, max_model_len=CONTEXT)
IN_EVERY_RUN = ("Qwen 3 Next", "Nemotron-H", "LFM 2", "Mamba 2")
ON_WIDE_VECTORS = pytest.mark.skipif(
    not has_wide_vectors() or tiny.DEVICE.type != "cpu", reason="products of other shapes round otherwise"
)
PROMPT_ROWS = 2 * BLOCK_ROWS + 16
ROW_BY_ROW = ("Jamba", "Mamba", "Falcon Mamba", "Zamba")
SPECS = {
    "greedy": replace(SPEC, sampling=SamplingParams(temperature=0)),
    "T 0.8": replace(SPEC, sampling=SamplingParams(temperature=0.8)),
}


def longer(family: Family) -> Family:
    """With a context in which rows leave the window behind the base."""
    return replace(family, changes={**family.changes, "max_position_embeddings": CONTEXT})


def _marked(family: Family, in_every_run: Sequence[str] = IN_EVERY_RUN) -> Any:
    return pytest.param(family, id=family.name, marks=() if family.name in in_every_run else pytest.mark.full)


def built(name: str, **settings: Any) -> Engine:
    return tiny.build(tiny.random_model(longer(named(name)).config()), SETTINGS, **settings)


@pytest.fixture(scope="module", params=[_marked(family) for family in STATEFUL])
def stateful(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ServedFamily:
    """Read back from a checkpoint that transformers wrote."""
    model, folder = tiny.random_model(longer(request.param).config()), tmp_path_factory.mktemp("checkpoint")
    plain = tiny.Plain(model)
    model.save_pretrained(folder)
    engine = tiny.transformer(load_decoder(resolve(str(folder)), SETTINGS), SETTINGS)
    return ServedFamily(engine, model, plain)


@pytest.fixture(scope="module")
def mamba() -> ServedFamily:
    model = tiny.random_model(longer(named("Mamba 2")).config())
    plain = tiny.Plain(model)
    return ServedFamily(tiny.transformer(model, SETTINGS), model, plain)


def wrong(text: Sequence[int], known: int) -> Proposal:
    """Two tokens, none of which comes."""
    token = (text[known] + 1) % tiny.VOCAB
    return Proposal(1, (token, token), (0.5, 0.5))


def check_texts(served: ServedFamily, spec: SessionSpec) -> None:
    """A text in which most tokens differ, through any rounds."""
    text = sampled(served.plain, spec, LENGTH)
    assert len({*text[len(PROMPT) :]}) >= DIFFERENT
    for propose in (tree_of, chain_of, wrong):
        assert speculated(served.engine, text, propose, spec) == text


@pytest.mark.parametrize("spec", ["T 0.8", *tiny.in_full("greedy")])
def test_texts_are_those_of_forward_passes(stateful: ServedFamily, spec: str) -> None:
    check_texts(stateful, SPECS[spec])


# One text of seed 1 is ill-conditioned in Qwen 3 Next: on some CPUs transformers' float32 is 1.1e-4 from double, ours
# 1.4e-4 to the other side.
@pytest.mark.parametrize("seed", [0, *tiny.in_full(2, 3)])
def test_trees_grow_lose_branches_and_become_trunk(stateful: ServedFamily, seed: int) -> None:
    check_growth(stateful.engine, stateful.plain, seed)


@ON_WIDE_VECTORS
@pytest.mark.parametrize("name", ["Qwen 3.5", "Falcon-H1", "LFM 2", *tiny.in_full("OLMo Hybrid", "Bamba", "LFM 3")])
def test_a_verified_row_has_the_bits_of_a_decoded_one(name: str) -> None:
    """Without experts, and with rows of whole vectors in the library's activations, as models have them."""
    family = longer(named(name))
    family = replace(family, changes={**family.changes, "intermediate_size": 64})
    engine, text = tiny.build(tiny.random_model(family.config()), SETTINGS), [*range(3, 97, 8), *range(2, 97, 8)]
    engine.open(1, 64)
    decoded = [step(engine, StepItem(1, row, (token,), logit_rows=(0,)))[0].copy() for row, token in enumerate(text)]
    engine.close(1)
    for ends in ((24,), (10, 13, 19, 24)):
        engine.open(1, 64)
        engine.open(2, 64)
        start = 0
        for end in ends:
            beside = chain(2, start, [7] * (end - start))
            logits = engine.step(StepPlan((beside, chain(1, start, [*text[start:end], 5, 6]))))[1]
            np.testing.assert_array_equal(logits[: end - start], decoded[start:end])
            start = end
        engine.close(1)
        engine.close(2)


def test_rows_far_behind_are_settled(mamba: ServedFamily) -> None:
    engine, plain = mamba.engine, mamba.plain
    text = [token % tiny.VOCAB for token in range(5, WINDOW + 45, 3) for _ in range(3)][: WINDOW + 40]
    engine.open(1, CONTEXT)
    step(engine, chain(1, 0, text))
    with pytest.raises(PrefixMismatch, match="trunk_length = 39: must be 0 or at least 40"):
        step(engine, chain(1, 39, (1,)))
    plain.assert_row(step(engine, chain(1, 40, (1, 2)))[1], [*text[:40], 1, 2])
    plain.assert_row(step(engine, chain(1, 0, (9,)))[0], [9])
    tree = tuple(range(WINDOW + 1))
    with pytest.raises(InvalidInput, match=f"tree rows = {WINDOW + 1}: must be at most {WINDOW}"):
        step(engine, StepItem(1, 1, tuple(token % 97 for token in tree), parents=(-1, *(0 for _ in tree[1:]))))
    engine.close(1)


def test_prompts_are_computed_in_blocks(stateful: ServedFamily) -> None:
    """Whole blocks of the prompt at once, the rest row by row; blocks are settled, and what is behind them isn't."""
    engine, text = stateful.engine, [token * 7 % tiny.VOCAB for token in range(PROMPT_ROWS + 3)]
    engine.open(1, CONTEXT, Prefix(prompt_rows=PROMPT_ROWS))
    step(engine, chain(1, 0, text[:BLOCK_ROWS]))
    step(engine, chain(1, BLOCK_ROWS, text[BLOCK_ROWS : PROMPT_ROWS - 1]))
    settled = PROMPT_ROWS // BLOCK_ROWS * BLOCK_ROWS
    with pytest.raises(PrefixMismatch, match=f"trunk_length = {settled - 1}: must be 0 or at least {settled}"):
        step(engine, chain(1, settled - 1, (1,)))
    for start in (settled, PROMPT_ROWS - 1):
        logits = step(engine, chain(1, start, text[start:]))
        for row, end in zip(logits, range(start + 1, len(text) + 1), strict=True):
            stateful.plain.assert_row(row, text[:end])
    engine.close(1)


@pytest.mark.parametrize("family", [_marked(family, (*IN_EVERY_RUN[1:3], "Mamba", "Zamba")) for family in STATEFUL])
def test_layers_that_begin_anew_in_steps_of_several_rows_take_them_one_by_one(family: Family) -> None:
    engine: Any = tiny.build(tiny.random_model(longer(family).config()), SETTINGS)
    assert {mixer.in_blocks for mixer in engine.attention.mixers} == {family.name not in ROW_BY_ROW}


def test_a_layer_that_begins_anew_would_be_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixers, "_is_same_in_blocks", lambda mixer, like: True)
    model = tiny.random_model(longer(named("Mamba")).config())
    plain = tiny.Plain(model)
    with pytest.raises(AssertionError, match="Mismatched elements"):
        test_prompts_are_computed_in_blocks(ServedFamily(tiny.transformer(model, SETTINGS), model, plain))


@ON_WIDE_VECTORS
def test_a_prompts_rows_have_the_same_bits_wherever_it_is_cut_between_blocks(mamba: ServedFamily) -> None:
    """In a model of nothing but recurrent layers; attention over many rows rounds by their number."""
    text, logits = [token * 7 % tiny.VOCAB for token in range(PROMPT_ROWS)], []
    for ends in ((PROMPT_ROWS,), (BLOCK_ROWS, PROMPT_ROWS), (2 * BLOCK_ROWS, 2 * BLOCK_ROWS + 3, PROMPT_ROWS)):
        mamba.engine.open(1, CONTEXT, Prefix(prompt_rows=PROMPT_ROWS))
        for start, end in itertools.pairwise((0, *ends)):
            last = step(mamba.engine, chain(1, start, text[start:end]))[-1].copy()
        mamba.engine.close(1)
        logits.append(last)
    np.testing.assert_array_equal(logits[1:], [logits[0]] * 2)


def test_states_are_part_of_the_budget() -> None:
    settings = {"kv_bytes": 1 << 20, "max_num_seqs": 64}
    engine = built("LFM 2", **settings)
    states, rows = engine.info.session_rows, engine.info.max_kv_rows
    own_bytes = 2 * 32 * 3 * 4 + WINDOW * 32 * 4
    assert states == -(-own_bytes // (2 * 2 * 8 * 4))
    engine.open(1, rows // 2 - states)
    engine.open(2, rows - rows // 2 - states)
    assert engine.kv_rows == rows
    with pytest.raises(Overloaded, match=f"{states + 1} KV rows needed, 0 free"):
        engine.open(3, 1)
    engine.close(1)
    engine.close(2)
    assert engine.kv_rows == 0
    with pytest.raises(InvalidInput, match="the whole KV budget"):
        engine.open(1, rows - states + 1)


def test_prefixes_are_computed_anew(mamba: ServedFamily) -> None:
    prefix = Prefix(tuple(range(3, 73)), 70)
    for _ in range(2):
        assert mamba.engine.open(1, CONTEXT, prefix) == 0
        logits = step(mamba.engine, chain(1, 0, prefix.token_ids))
        mamba.plain.assert_row(logits[-1], prefix.token_ids)
        mamba.engine.close(1)
    assert mamba.engine.cached_rows == 0


def test_bounds_of_time_steps_hold_in_the_recurrent_form() -> None:
    """Nemotron-H's least time step is in transformers' forward pass, and not in its single steps."""
    model: Any = tiny.random_model(named("Nemotron-H").config())
    mixer = model.model.layers[0].mixer
    with torch.no_grad():
        mixer.dt_bias.copy_(torch.tensor([-12.0, -9.0, 0.0, 1.0]))
        mixer.A_log.fill_(6.0)
    plain = tiny.Plain(model)
    engine = tiny.transformer(model)
    check_growth(engine, plain, 0)
    mixer.in_proj._forward_hooks.clear()
    with pytest.raises(AssertionError):
        check_growth(engine, plain, 0)


def test_drafts_of_another_vocabulary_refuse_states_by_name() -> None:
    nothing: Any = None
    with pytest.raises(Unsupported, match="tiny: recurrent layers in a draft of another vocabulary"):
        TranslatedEngine(built("LFM 2"), nothing, nothing, "", SETTINGS)


def test_a_draft_goes_back_as_far_as_its_states_do() -> None:
    """One row, while no step has begun behind it; else all of them."""
    tree = DraftTree(1, range(3, 13), 64, whole_trunk=True)
    engine = built("LFM 2")
    engine.open(1, 64)
    for rows, nodes, lag in ((10, [], 1), (1, [5], 10), (10, [], 1)):
        step(engine, tree.item(rows, ()))
        if nodes:
            step(engine, tree.item(0, [tree.root.child(token) for token in nodes]))
        tree.forget()
        assert tree.lag == lag
    step(engine, tree.item(1, ()))
