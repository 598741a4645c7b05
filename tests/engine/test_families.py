"""Families of targets: greedy text as transformers generates it, sampled text through trees and chains."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.engine import attention, probe, transformer
from paceline.engine.attention import SINKS, SOFTCAP, Horizon
from paceline.engine.cpu import row_attention
from paceline.engine.cuda import packing
from paceline.engine.cuda.static_engine import StaticEngine
from paceline.engine.forward import ATTENTION_NAME, AttentionCall
from paceline.engine.index import IndexCall
from paceline.engine.interface import Engine, Prefix, StepItem
from paceline.engine.kv import SessionKV
from paceline.engine.mixers import RowState
from paceline.engine.states import SessionStates, StepStates
from paceline.engine.transformer import TransformerEngine
from paceline.engine.weights import load_decoder
from paceline.models.resolve import resolve
from paceline.protocol.errors import Unsupported
from paceline.protocol.proposal import ROOT, Acceptance, Proposal
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.protocol.session import SessionSpec
from paceline.protocol.target import Round
from paceline.runtime.config import EngineSettings
from paceline.sampling.tree import child_with_token
from paceline_training.corpus import Role, Row
from paceline_training.text_pass import learned_logits
from target_service.verifier import verify
from tests.engine import tiny
from tests.engine.families import CONTEXT, REFUSED, SERVED, Family, named, table
from tests.engine.parallel.ranks import run_ranks
from tests.engine.parallel.test_parallel_engine import share_of
from tests.engine.test_growth import check_growth
from tests.engine.tiny import chain, step

PROMPT = (5, 17, 3, 88, 41, 9, 60, 23, 71, 12)
LENGTH = 34
"""Tokens of a text: several windows."""
SETTINGS = EngineSettings(threads=1, kv_bytes=1 << 24, max_model_len=CONTEXT)
SPEC = SessionSpec(PROMPT, len(PROMPT), SamplingParams(temperature=0.9), NoiseKey(11), Acceptance.COUPLED)
CORE = [family for family in SERVED if family.core]
DOCS = Path(__file__).parents[2] / "docs" / "models.md"


@dataclass(frozen=True)
class ServedFamily:
    """An engine, and the same model as transformers made it."""

    engine: TransformerEngine
    model: Any
    plain: tiny.Plain


def loaded(family: Family, folder: Path | None = None) -> ServedFamily:
    """Made as it is, or read back from a checkpoint that it is written to."""
    model = tiny.random_model(family.config())
    for name, weight in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(weight, mean=1.0)
    whole: Any = copy.deepcopy(model)
    plain = tiny.Plain(model)
    if folder is not None:
        model.save_pretrained(folder)
        model = load_decoder(resolve(str(folder)), SETTINGS)
    return ServedFamily(tiny.transformer(model, SETTINGS), whole.eval(), plain)


def built(family: Family, *, static: bool = False, **more: Any) -> Engine:
    return tiny.build(tiny.random_model(family.config()), SETTINGS, static=static, **more)


def pair(name: str, **more: Any) -> tuple[Engine, tiny.Plain]:
    return built(named(name), **more), tiny.Plain(tiny.random_model(named(name).config()))


def _marked(family: Family) -> Any:
    return pytest.param(family, id=family.name, marks=() if family.core else pytest.mark.full)


@pytest.fixture(scope="module", params=[_marked(family) for family in sorted(SERVED, key=lambda each: not each.core)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ServedFamily:
    return loaded(request.param, tmp_path_factory.mktemp("checkpoint"))


OF_THE_CORE = pytest.mark.parametrize("served", CORE, indirect=True, ids=lambda family: family.name)


def greedy(engine: Engine) -> list[int]:
    """The prompt in two chunks, then a token a step."""
    tokens = list(PROMPT)
    engine.open(1, CONTEXT)
    step(engine, StepItem(1, 0, PROMPT[:7]))
    base = 7
    while len(tokens) < LENGTH:
        logits = step(engine, StepItem(1, base, tuple(tokens[base:]), logit_rows=(len(tokens) - base - 1,)))
        base = len(tokens)
        tokens.append(int(logits[0].argmax()))
    engine.close(1)
    return tokens


def generated(model: Any) -> list[int]:
    prompt, all_seen = torch.tensor([PROMPT]), torch.ones((1, len(PROMPT)), dtype=torch.long)
    limits = {"max_length": LENGTH, "min_length": LENGTH, "eos_token_id": None, "pad_token_id": 0}
    tokens: list[int] = model.generate(prompt, attention_mask=all_seen, do_sample=False, **limits)[0].tolist()
    return tokens


def test_greedy_text_is_that_of_generate(served: ServedFamily) -> None:
    assert greedy(served.engine) == generated(served.model)


def sampled(
    plain: tiny.Plain, spec: SessionSpec = SPEC, length: int = LENGTH, prompt: Sequence[int] = PROMPT
) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < length:
        round_ = Round(1, len(tokens) - 1, ROOT, (tokens[-1],))
        tokens.extend(verify(plain.logits(tokens)[None], spec, round_).token_ids)
    return tokens


def tree_of(text: Sequence[int], known: int) -> Proposal:
    """What comes, as a branch beside wrong ones; every node's row differs from its position."""
    first, second, third = (*text[known : known + 3], 1, 2, 3)[:3]
    wrong = [(token + 1) % tiny.VOCAB for token in (first, second, third)]
    nodes = (wrong[0], first, wrong[1], second, wrong[1], wrong[2], third)
    return Proposal(1, nodes, (0.5,) * 7, (ROOT, ROOT, 0, 1, 1, 3, 3))


def chain_of(text: Sequence[int], known: int) -> Proposal:
    first, second, third = (*text[known : known + 3], 1, 2, 3)[:3]
    return Proposal(1, (first, second, (third + 1) % tiny.VOCAB), (0.5,) * 3)


def speculated(
    engine: Engine, text: Sequence[int], propose: Callable[[Sequence[int], int], Proposal], spec: SessionSpec = SPEC
) -> list[int]:
    """A text in rounds, whatever is accepted kept, and the rest rolled back."""
    tokens, base = list(PROMPT), len(PROMPT) - 1
    kept: tuple[int, ...] = ()
    engine.open(1, len(text) + 16)
    step(engine, StepItem(1, 0, PROMPT[:-1]))
    while len(tokens) < len(text):
        proposal = propose(text, len(tokens))
        parents = (ROOT, *(parent + 1 for parent in proposal.parents))
        rows = tuple(range(len(parents)))
        logits = step(engine, StepItem(1, base, (tokens[-1], *proposal.token_ids), parents, kept, rows))
        drawn = verify(logits, spec, Round(1, base, ROOT, (tokens[-1],), proposal)).token_ids
        node: int | None = ROOT
        path = [base]
        while node is not None:
            tokens.append(drawn[node + 1])
            node = child_with_token(proposal, node, tokens[-1])
            path += [base + 1 + node] if node is not None else []
        kept, base = tuple(path), base + len(path)
    engine.close(1)
    return tokens[: len(text)]


def test_sampled_text_is_that_of_plain_forward_passes(served: ServedFamily) -> None:
    text = sampled(served.plain)
    for propose in (tree_of, chain_of):
        assert speculated(served.engine, text, propose) == text


@OF_THE_CORE
@pytest.mark.parametrize("compiled", [True, False], ids=["few keys", "many keys"])
def test_trees_grow_lose_branches_and_become_trunk(
    served: ServedFamily, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    if not compiled:
        monkeypatch.setattr(served.engine, "few_keys", 0)
        monkeypatch.setattr(served.engine, "row_decoder", None)
    check_growth(served.engine, served.plain, 1)


@OF_THE_CORE
def test_sessions_share_rows_of_every_width(served: ServedFamily) -> None:
    tokens = tuple(range(3, 43))
    prefix = Prefix(tokens, len(tokens))
    for reused in (0, 39):
        assert served.engine.open(1, CONTEXT, prefix) == reused
        logits = step(served.engine, StepItem(1, reused, tokens[reused:], logit_rows=(len(tokens) - reused - 1,)))
        served.plain.assert_row(logits[0], tokens)
        served.engine.close(1)


@pytest.mark.parametrize("name", ["Llama 4", "Gemma 2", "gpt-oss"])
def test_static_steps_know_it_all(name: str) -> None:
    engine, plain = pair(name, static=True)
    assert isinstance(engine, StaticEngine)
    text = sampled(plain)
    assert speculated(engine, text, tree_of) == text
    check_growth(engine, plain, 0)


def test_the_comparison_with_static_steps_catches_windows_counted_in_kv_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, plain = pair("Mistral 7B v0.1", static=True)
    put_visible = packing._put_visible

    def counting_rows(integers: Any, group: Any, fields: Any, items: Any, rows: Any, horizons: Any) -> None:
        kv_rows = np.arange(len(rows.positions)) + np.repeat(rows.bases - rows.lows, rows.counts)
        put_visible(integers, group, fields, items, replace(rows, positions=kv_rows), horizons)

    monkeypatch.setattr(packing, "_put_visible", counting_rows)
    monkeypatch.setattr(attention, "key_positions", lambda item: np.arange(item.base_length + len(item.token_ids)))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        for seed in range(4):
            check_growth(engine, plain, seed)


@pytest.mark.parametrize("name", ["Mistral 7B v0.1", "Llama 4"])
def test_windows_are_reproducible(name: str) -> None:
    engine, plain = pair(name, reproducible=True)
    text = sampled(plain)
    rows = []
    for propose in (tree_of, chain_of):
        assert speculated(engine, text, propose) == text
    for chunks in ((0, 7, 40), (0, 33, 34, 40)):
        engine.open(1, CONTEXT, Prefix(prompt_rows=40))
        for start, end in itertools.pairwise(chunks):
            logits = step(engine, chain(1, start, (*text, 1, 2, 3, 4, 5, 6)[start:end]))
        rows.append(logits[-1].copy())
        engine.close(1)
    assert (rows[0] == rows[1]).all()


REPRODUCIBLE, STATIC, RANKS = {"reproducible": True}, {"static": True}, {"ranks": 1}


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("Gemma 2", REPRODUCIBLE, "in reproducible mode: attention with softcap"),
        ("DeepSeek-V3, R1, Kimi K2", REPRODUCIBLE, "mode: keys and values, or layers, of different shapes"),
        ("DeepSeek-V3.2", REPRODUCIBLE, "in reproducible mode: attention with indices"),
        ("LFM 2", REPRODUCIBLE, "Lfm2ForCausalLM in reproducible mode: recurrent layers"),
        ("LFM 2", STATIC, "in steps of few shapes: recurrent layers"),
        ("DeepSeek-V3.2", STATIC, "DeepseekV32ForCausalLM in steps of few shapes: an index of keys"),
        ("LFM 2", RANKS, "recurrent layers with 1 ranks: one process only"),
        ("Mistral 7B v0.1", RANKS, "sliding windows or chunks with 1 ranks: one process only"),
        ("MiMo-V2-Flash", RANKS, "sliding windows.*: one process only"),
        ("DeepSeek-V3.2", RANKS, "an index of keys.*: one process only"),
    ],
)
def test_what_other_engines_do_not_know_is_refused(name: str, settings: dict[str, Any], message: str) -> None:
    model = tiny.random_model(named(name).config())
    with pytest.raises(Unsupported, match=message):
        if settings is RANKS:
            run_ranks(1, lambda group: share_of(model, group), lambda group: None)
        else:
            tiny.build(model, SETTINGS, **settings)


def test_a_draft_is_trained_on_the_attention_it_will_have() -> None:
    for name in ("Gemma 2", "gpt-oss"):
        model = tiny.random_model(named(name).config())
        plain = tiny.Plain(model)
        model.train(False)
        model.set_attn_implementation(ATTENTION_NAME)
        tokens = np.arange(3, 33, dtype=np.int32)
        logits = learned_logits(model, Row(tokens, np.full(30, Role.ANSWER, np.int8), 1.0)).detach()
        plain.assert_row(logits[-1].numpy(), tokens[:-1].tolist())


@pytest.mark.parametrize("family", REFUSED, ids=lambda family: family.name)
def test_what_is_refused_is_refused_by_name(family: Family) -> None:
    with pytest.raises(Unsupported, match=family.refused):
        built(family)


def test_the_table_of_families_is_this_list() -> None:
    assert table() in DOCS.read_text(), "python -m tests.engine.families makes the table"


def _resized(by: int) -> Callable[[pytest.MonkeyPatch], None]:
    """Windows and chunks that are longer or shorter."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        horizon = probe._horizon

        def resized(*arguments: Any) -> Horizon | None:
            right = horizon(*arguments)
            return None if right is None else replace(right, size=right.size + by)

        patch.setattr(probe, "_horizon", resized)

    return mutate


def _windows_count_rows(patch: pytest.MonkeyPatch) -> None:
    """On a tree, neighbours among KV rows take each other for earlier positions."""

    def by_row(item: StepItem, horizon: Horizon | None) -> list[tuple[int, int, list[int]]]:
        firsts = [0 if horizon is None else int(horizon[item.base_length + i]) for i in range(len(item.token_ids))]
        return [
            (min(first, end), end, [slot for slot in path if slot >= first])
            for first, (end, path) in zip(firsts, row_attention._paths(item), strict=True)
        ]

    patch.setattr(attention, "key_positions", lambda item: np.arange(item.base_length + len(item.token_ids)))
    patch.setattr(row_attention, "_visible_slots", by_row)


def _without(term: str) -> Callable[[pytest.MonkeyPatch], None]:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        whole = attention.packed_attention

        def bare(call: AttentionCall, *rest: Any) -> torch.Tensor:
            return whole(call._replace(extras={**call.extras, term: None}), *rest)

        patch.setattr(transformer, "packed_attention", bare)

    return mutate


def _past_the_commit(patch: pytest.MonkeyPatch) -> None:
    begin = SessionStates.begin

    def past(states: SessionStates, item: StepItem) -> None:
        begin(states, item)
        states._at_base = states._behind_last or states._at_base

    patch.setattr(SessionStates, "begin", past)


def _shifted_windows(patch: pytest.MonkeyPatch) -> None:
    copy_of = RowState.copy

    def shifting(state: RowState) -> RowState:
        other = copy_of(state)
        other._windows = {index: window.roll(1, dims=-1) for index, window in other._windows.items()}
        return other

    patch.setattr(RowState, "copy", shifting)


def _neighbours_state(patch: pytest.MonkeyPatch) -> None:
    begin = StepStates.begin

    def crossing(cls: Any, *arguments: Any) -> StepStates:
        step_states = begin(*arguments)
        sessions = [states for states, _, _ in step_states.parts]
        bases = [states._at_base for states in sessions]
        for states, base in zip(sessions, (*bases[1:], *bases[:1]), strict=True):
            states._at_base = base
        return step_states

    patch.setattr(StepStates, "begin", classmethod(crossing))


def _first_inputs(patch: pytest.MonkeyPatch) -> None:
    """The inputs of the first rows are kept, whatever path was accepted."""
    begin = SessionStates.begin

    def first(states: SessionStates, item: StepItem) -> None:
        states._inputs = [inputs[torch.arange(len(inputs)).clamp(max=1)] for inputs in states._inputs]
        begin(states, item)

    patch.setattr(SessionStates, "begin", first)


def _choice(wrong: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """An index that chooses so for a session's rows."""
    mask = IndexCall.mask
    return lambda patch: patch.setattr(IndexCall, "mask", lambda *arguments: wrong(mask, *arguments))


def _among_all_rows(mask: Any, call: Any, low: int, keys: Any, visible: torch.Tensor) -> Any:
    return mask(call, low, keys, torch.ones_like(visible)).masked_fill_(~visible, float("-inf"))


def _of_the_row_before(mask: Any, call: Any, low: int, keys: torch.Tensor, visible: Any) -> Any:
    return mask(call, low, keys.roll(1, dims=0), visible)


def _one_key_too_many(patch: pytest.MonkeyPatch) -> None:
    best = IndexCall.best

    def one_more(call: IndexCall, *arguments: Any) -> torch.Tensor:
        call.indexer.index_topk += 1
        try:
            return best(call, *arguments)
        finally:
            call.indexer.index_topk -= 1

    patch.setattr(IndexCall, "best", one_more)


def _index_keys_stay(patch: pytest.MonkeyPatch) -> None:
    """Those of the rows that a tree had where its kept rows move to, a rejected branch's."""
    keep = SessionKV.keep

    def keep_others(kv: SessionKV, *arguments: Any) -> None:
        index_keys = [kv.index_keys(layer) for layer, tensors in enumerate(kv._layers) if len(tensors) > 2]
        own = [each.clone() for each in index_keys]
        keep(kv, *arguments)
        for each, before in zip(index_keys, own, strict=True):
            each.copy_(before)

    patch.setattr(SessionKV, "keep", keep_others)


MUTANTS = {
    "keys are chosen among all rows of a step": (_choice(_among_all_rows), "DeepSeek-V3.2"),
    "the index key of the row before": (_choice(_of_the_row_before), "DeepSeek-V3.2"),
    "one key too many": (_one_key_too_many, "DeepSeek-V3.2"),
    "index keys of a rejected branch": (_index_keys_stay, "GLM-5"),
    "states that have moved on past the commit": (_past_the_commit, "Qwen 3 Next"),
    "convolution windows shifted by one": (_shifted_windows, "LFM 2"),
    "a neighbour's state": (_neighbours_state, "Falcon-H1"),
    "inputs of other rows than the accepted ones": (_first_inputs, "Mamba 2"),
    "a window longer by one": (_resized(1), "Mistral 7B v0.1"),
    "a window shorter by one": (_resized(-1), "Gemma 3"),
    "a chunk longer by one": (_resized(1), "Llama 4"),
    "a window counted in KV rows": (_windows_count_rows, "Mistral 7B v0.1"),
    "a window counted in KV rows, one by one": (_windows_count_rows, "Gemma 2"),
    "no soft-cap": (_without(SOFTCAP), "Gemma 2"),
    "no sinks": (_without(SINKS), "gpt-oss"),
}


@pytest.mark.parametrize("name", list(MUTANTS))
def test_the_self_check_and_the_texts_catch(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    mutate, family = MUTANTS[name]
    mutate(monkeypatch)
    with pytest.raises(Unsupported, match="packed logits differ"):
        loaded(named(family))
    monkeypatch.setattr("paceline.engine.decoder.self_check", lambda engine, reference: None)
    mutant = loaded(named(family))
    with pytest.raises(AssertionError):
        for seed in range(2):
            check_growth(mutant.engine, mutant.plain, seed)
