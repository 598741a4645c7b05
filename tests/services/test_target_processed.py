"""The target's processors over real gRPC: transformers' own greedy text, grammars that wait, fail and are closed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, PreTrainedModel

from paceline.engine.decoder import build_engine
from paceline.grammars.pool import WorkerPool
from paceline.grammars.sessions import Grammars
from paceline.models.table_names import TableSpec
from paceline.models.tokenizer import TableTokenizer, Tokenizer
from paceline.protocol.proposal import ROOT, Proposal
from paceline.protocol.sampling import Grammar, GrammarKind, SamplingParams
from paceline.protocol.session import Close, Failure
from paceline.protocol.target import Round, TargetOpen, TargetOpened
from paceline.runtime.config import EngineSettings
from paceline.sampling.acceptance import coupled_walk
from tests.engine import tiny
from tests.sampling.test_processors import OverOutput
from tests.services.harness import (
    Events,
    RecordingEngine,
    eventually,
    first_round,
    linked_target,
    target_open,
    verdict_of,
)

END = tiny.VOCAB - 1
PROMPT = (5, 17, 5, 60, 33, 2)
LENGTH = 30
CHAINS = {
    "repetition": SamplingParams(temperature=0, repetition_penalty=1.4),
    "counts": SamplingParams(temperature=0, presence_penalty=1.5, frequency_penalty=0.9),
    "bias": SamplingParams(temperature=0, logit_bias=((7, 4.5), (8, -3.0), (END, -2.0)), repetition_penalty=1.2),
    "everything": SamplingParams(
        temperature=0,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        logit_bias=((3, 2.0), (END, 6.0)),
        min_tokens=12,
    ),
}


def tiny_model() -> PreTrainedModel:
    return tiny.random_model(tiny.llama())


def generated(params: SamplingParams) -> list[int]:
    """transformers' own greedy text."""
    model: Any = tiny_model()
    output = model.generate(
        torch.tensor([PROMPT]),
        do_sample=False,
        max_new_tokens=LENGTH,
        eos_token_id=END,
        pad_token_id=END,
        repetition_penalty=params.repetition_penalty,
        sequence_bias=[[[token], bias] for token, bias in params.logit_bias] or None,
        bad_words_ids=[list(word) for word in params.bad_words] or None,
        min_new_tokens=params.min_tokens or None,
        logits_processor=LogitsProcessorList(
            [OverOutput(params.presence_penalty, params.frequency_penalty, len(PROMPT))]
        ),
    )
    tokens: list[int] = output[0, len(PROMPT) :].tolist()
    return tokens


def with_bad_words(params: SamplingParams, text: Sequence[int]) -> SamplingParams:
    """The same, without what its own text has at some places."""
    words = ((text[2],), (text[4], text[5]), tuple(text[7:10]), (PROMPT[-1], text[0]))
    return SamplingParams(**{**vars(params), "bad_words": words})


def drafted(rng: np.random.Generator, right: Sequence[int], tree: bool) -> Proposal:
    """Right tokens with wrong ones among them, as a chain or a tree."""
    tokens: list[int] = []
    parents: list[int] = []
    for node in range(int(rng.integers(0, 7))):
        parent = int(rng.integers(-1, node)) if tree else node - 1
        depth = 0 if parent == ROOT else depth_of(parents, parent)
        wild = rng.random() < 0.3 or depth >= len(right)
        tokens.append(int(rng.integers(tiny.VOCAB)) if wild else right[depth])
        parents.append(parent)
    return Proposal(1, tuple(tokens), (1.0,) * len(tokens), tuple(parents))


def depth_of(parents: Sequence[int], node: int) -> int:
    return 1 if parents[node] == ROOT else 1 + depth_of(parents, parents[node])


async def written(
    events: Events, session: int, params: SamplingParams, expected: Sequence[int], tree: bool
) -> list[int]:
    """The text of rounds with drafts, through the service, re-opened in the middle."""
    rng, text, node, opened = np.random.default_rng(session), list[int](), ROOT, False
    while len(text) < len(expected):
        history = [*PROMPT, *text]
        if not opened or rng.random() < 0.1:
            if opened:
                events.send(Close(session))
            session += 1000
            facts = {"prompt_length": len(PROMPT), "sampling": params, "end_token_ids": (END,)}
            events.send(target_open(session, history, **facts))
            opened, node = True, ROOT
        proposal = drafted(rng, expected[len(text) :], tree)
        round_ = Round(session, len(history) - 1, node, (history[-1],), proposal)
        verdict = await verdict_of(events, round_)
        node = coupled_walk(proposal, verdict.token_ids)
        text += [*(proposal.token_ids[i] for i in proposal.path(node)), verdict.token_ids[node + 1]]
        if END in text:
            return text[: text.index(END) + 1]
    return text[: len(expected)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "everything" else pytest.mark.full) for name in CHAINS]
)
async def test_greedy_text_is_transformers_own_token_for_token(name: str) -> None:
    plain = CHAINS[name]
    engine = build_engine(tiny_model(), TableTokenizer(tiny.VOCAB, END), EngineSettings(threads=1), "tiny")
    async with linked_target(engine) as events:
        for session, params in enumerate((plain, with_bad_words(plain, generated(plain))), start=1):
            expected = generated(params)
            assert len(expected) > 8
            for tree in (False, True):
                assert await written(events, 2 * session + tree, params, expected, tree) == expected


SPEC = TableSpec(vocab=32, seed=3, max_length=256, eos=31)
GRAMMAR = Grammar(GrammarKind.REGEX, "(ab|cd)+")
PREFIX = (1, 2, 3)


def tokenizer() -> Tokenizer:
    return TableTokenizer(32, 31)


def constrained(session: int, **changes: Any) -> TargetOpen:
    facts = {"sampling": SamplingParams(grammar=GRAMMAR), "end_token_ids": (31,), **changes}
    return target_open(session, PREFIX, **facts)


async def is_served(events: Events, opening: TargetOpen) -> None:
    """Its first token begins the grammar's text, if it has one."""
    events.send(opening)
    (token,) = (await verdict_of(events, first_round(opening.session_id, PREFIX))).token_ids
    assert token in (0, 2) or not opening.spec.sampling.grammar


async def test_a_grammar_that_takes_its_time_delays_nobody_else() -> None:
    asked, go = threading.Event(), threading.Event()

    def slowly() -> Tokenizer:
        asked.set()
        assert go.wait(10)
        return tokenizer()

    engine = RecordingEngine(SPEC)
    async with linked_target(engine, grammars=Grammars(slowly)) as events:
        for session in (1, 2):
            events.send(constrained(session), first_round(session, PREFIX))
        await is_served(events, target_open(3, PREFIX))
        await eventually(asked.is_set, "the grammar is asked for")
        events.send(Close(2))
        await eventually(lambda: events.servicer.status().sessions == 2, "session 2 is closed")
        go.set()
        assert await events.of(TargetOpened, 1)
        events.send(Close(1), Close(3))
        await eventually(lambda: engine.kv_rows == 0, "all rows are free")
        await eventually(lambda: events.servicer.status().queue_length == 0, "nothing waits")


async def test_opens_whose_chain_cannot_be_served() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"sampling": SamplingParams(grammar=Grammar(GrammarKind.REGEX, "(a"))}, "regex = "),
        ({"end_token_ids": (30,)}, "end_token_ids = (30,): must be (31,)"),
        ({"sampling": SamplingParams(), "end_token_ids": (32,)}, "end_token_ids = 32"),
        ({"sampling": SamplingParams(logit_bias=((32, 1.0),))}, "logit_bias id = 32"),
        ({"sampling": SamplingParams(bad_words=((1, 32),))}, "bad_words id = 32"),
    ]
    async with linked_target(RecordingEngine(SPEC), grammars=Grammars(tokenizer)) as events:
        for changes, text in cases:
            await events.expect_failure(constrained(1, **changes), "INVALID_INPUT", text, closed=True)
        await is_served(events, constrained(2))
        assert events.servicer.status().sessions == 1


async def test_a_tokenizer_that_cannot_be_loaded_is_a_defect_of_one_session() -> None:
    def broken() -> Tokenizer:
        raise RuntimeError("no such file")

    async with linked_target(RecordingEngine(SPEC), max_queue=1, grammars=Grammars(broken)) as events:
        assert (await events.answer(constrained(1), Failure)).reason == "INTERNAL"
        assert events.servicer.scheduler.waiting == 0
        await is_served(events, target_open(2, PREFIX))


async def test_a_grammar_that_finds_no_thread_keeps_no_place_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise RuntimeError("can't start new thread")

    async with linked_target(RecordingEngine(SPEC), max_queue=1, grammars=Grammars(tokenizer)) as events:
        await is_served(events, target_open(9, PREFIX))  # all threads of the service run
        with monkeypatch.context() as limited:
            limited.setattr(WorkerPool, "join", fails)
            assert (await events.answer(constrained(1), Failure)).session_closed
        assert events.servicer.scheduler.waiting == 0
        await is_served(events, constrained(2))


async def test_a_target_without_a_tokenizer_says_so(target: Events) -> None:
    await target.expect_failure(constrained(1), "UNSUPPORTED", closed=True)
