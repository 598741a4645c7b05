"""Shadows over real gRPC: what a draft says where it proposed nothing is what its proposals would have been."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from draft_service.drafters import model
from draft_service.drafters.draws import Distribution, Draws, PreDrawnDraws, draws_of
from draft_service.drafters.shadow import Standing
from draft_service.drafters.state import SessionState
from draft_service.drafters.tree import Node
from paceline.engine.decoder import build_engine
from paceline.engine.interface import Engine
from paceline.engine.table.engine import TableEngine, TableModel
from paceline.models.table_names import TableSpec
from paceline.models.tokenizer import TableTokenizer
from paceline.protocol.draft import Commit, DraftBudget, DraftedProposal, DraftOpened, Shadow, Verifying
from paceline.protocol.proposal import ROOT, Acceptance, Outcome, Proposal
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.protocol.session import Close
from paceline.protocol.target import Round
from paceline.runtime.config import EngineSettings
from paceline.sampling.acceptance import Decision, decide
from paceline.sampling.distribution import processed_scores, sparse_support
from paceline.sampling.drafted import draft_key
from paceline.sampling.noise import Stream
from paceline.sampling.racing import race
from tests.engine import tiny
from tests.services.harness import (
    NOISE,
    Events,
    RecordingEngine,
    draft_open,
    eventually,
    linked_draft,
    linked_target,
    target_open,
    verdict_of,
)

PREFIX = (1, 2, 3, 4, 5)
LENGTH = 60
"""Tokens of a text."""
K1 = DraftBudget(max_tokens=1)
SHADOW = DraftBudget(shadow=True)
TARGET = TableSpec(vocab=32, seed=3, max_length=256)
DRAFT = replace(TARGET, disturb=1.2)
"""Accepted about as often as not."""
PENALISED = SamplingParams(
    temperature=0.8,
    repetition_penalty=1.3,
    presence_penalty=0.7,
    frequency_penalty=0.5,
    logit_bias=((6, 2.0), (7, -3.0)),
    bad_words=((8,), (9, 10), (11, 12, 13)),
)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "T .8": SamplingParams(temperature=0.8),
    "top-k 5": SamplingParams(temperature=0.8, top_k=5),
    "penalised": PENALISED,
    "greedy, penalised": replace(PENALISED, temperature=0.0),
}


def tiny_engine(disturb: float) -> Engine:
    """A transformer of a few thousand weights, to which so much noise is added; each service has one of its own."""
    transformer = tiny.random_model(tiny.llama())
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        for weights in transformer.parameters():
            weights.add_(disturb * torch.randn_like(weights))
    settings = EngineSettings(threads=1, kv_bytes=1 << 22)
    return build_engine(transformer, TableTokenizer(tiny.VOCAB, None), settings, "tiny")


def engines(kind: str) -> tuple[Engine, Engine]:
    """A draft's and a target's, of one vocabulary."""
    if kind == "table":
        return TableEngine(DRAFT), TableEngine(TARGET)
    return tiny_engine(0.03), tiny_engine(0)


@dataclass
class Text:
    """What rounds committed, and which of their proposals were accepted, by position."""

    ids: list[int] = field(default_factory=lambda: [*PREFIX])
    accepted: dict[int, bool] = field(default_factory=dict)
    proposals: list[Proposal] = field(default_factory=list)


Standings = dict[int, tuple[int, float]]
"""Rank and probability by position."""


def add(standings: Standings, shadow: Shadow) -> None:
    """Each position comes once, in order."""
    pairs = zip(shadow.ranks, shadow.probabilities, strict=True)
    for position, standing in enumerate(pairs, start=shadow.first_position):
        assert position > max(standings, default=0), "ascending"
        standings[position] = standing


def take_standings(events: Events, session: int) -> Standings:
    """All shadows of a session that have come."""
    standings: Standings = {}
    for shadow in events.take_all(Shadow, session):
        add(standings, shadow)
    return standings


async def standings_until(events: Events, end: int, session: int = 1) -> Standings:
    """All shadows of a session, once the one of the last position before `end` has come."""
    standings: Standings = {}
    while max(standings, default=0) < end - 1:
        add(standings, await events.of(Shadow, session))
    return standings


async def written(
    draft: Events, target: Events, session: int, sampling: SamplingParams, acceptance: Acceptance
) -> Text:
    """A text in rounds of one proposed token each."""
    text = Text()
    key = draft_key(NOISE, acceptance)
    facts = {"sampling": sampling, "acceptance": acceptance}
    draft.send(draft_open(session, PREFIX, K1, noise=key, takes_shadows=True, **facts))
    target.send(target_open(session, PREFIX, **facts))
    node = ROOT
    while len(text.ids) < len(PREFIX) + LENGTH:
        drafted = await draft.of(DraftedProposal, session)
        text.proposals.append(drafted.proposal)
        round_ = Round(session, len(text.ids) - 1, node, (text.ids[-1],), drafted.proposal)
        decision: Decision = decide(acceptance, round_, await verdict_of(target, round_), NOISE)
        text.accepted[len(text.ids)] = bool(decision.accepted)
        node, new = decision.node, (*decision.accepted, decision.next_token)
        outcome = Outcome(len(text.ids) - 1, node, new[-1])
        draft.send(Commit(session, outcome, new, len(text.ids), K1))
        text.ids += new
    await draft.of(DraftedProposal, session)
    return text


async def shadowed(
    draft: Events, session: int, text: list[int], sampling: SamplingParams, acceptance: Acceptance, **changes: Any
) -> Standings:
    """The shadow of a text for which nothing is proposed, committed in pieces."""
    key = draft_key(NOISE, acceptance)
    facts = {"noise": key, "sampling": sampling, "acceptance": acceptance} | changes
    draft.send(draft_open(session, PREFIX, DraftBudget(), takes_shadows=True, **facts))
    source, at = random.Random(session), len(PREFIX)
    while at < len(text):
        piece = tuple(text[at : at + source.randint(1, 7)])
        draft.send(Commit(session, Outcome(at - 1, ROOT, piece[-1]), piece, at, SHADOW))
        at += len(piece)
    standings = await standings_until(draft, len(text), session)
    draft.send(Close(session))
    return standings


@asynccontextmanager
async def services(kind: str) -> AsyncIterator[tuple[Events, Events]]:
    draft, target = engines(kind)
    async with linked_draft(draft) as from_draft, linked_target(target) as from_target:
        yield from_draft, from_target


def check_coupled(text: Text, standings: Standings) -> None:
    """Rank 1 is what was accepted, and the probability that of the proposal."""
    assert [*standings] == [*range(len(PREFIX), len(text.ids))], "every position, once"
    for (position, accepted), proposal in zip(text.accepted.items(), text.proposals, strict=True):
        rank, probability = standings[position]
        assert (rank == 1) == accepted, f"position {position}: rank {rank}, accepted: {accepted}"
        assert probability == pytest.approx(proposal.draft_probabilities[0], rel=1e-3)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if (kind == "table") == on_table else pytest.mark.full)
        for name, on_table in zip(SAMPLINGS, (True, False, True, True, False), strict=True)
        for kind in ("table", "tiny transformer")
    ],
)
async def test_a_shadow_says_what_would_have_been_accepted(name: str, kind: str) -> None:
    sampling = SAMPLINGS[name]
    async with services(kind) as (draft, target):
        text = await written(draft, target, 1, sampling, Acceptance.COUPLED)
        for_free = take_standings(draft, 1)
        standings = await shadowed(draft, 2, text.ids, sampling, Acceptance.COUPLED)
    check_coupled(text, standings)
    assert [*text.accepted] == [position for position in for_free if position in text.accepted]
    for position, (rank, probability) in for_free.items():
        assert rank == standings[position][0], "also where it costs nothing"
        assert probability == pytest.approx(standings[position][1], rel=1e-3)
    assert 5 < sum(text.accepted.values()) < len(text.accepted) - 5, "both kinds are seen"
    assert len({rank for rank, _ in standings.values()}) > 3


def own_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    def keyed(acceptance: Acceptance, sampling: SamplingParams, noise: NoiseKey, vocab_size: int) -> Draws:
        return draws_of(acceptance, sampling, NoiseKey(noise.seed + 1), vocab_size)

    monkeypatch.setattr(model, "draws_of", keyed)


def neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(self: SessionState, lag_nodes: list[Node]) -> None:
        for node in lag_nodes:
            self._compare(node, self.tree.committed[node.position])

    monkeypatch.setattr(SessionState, "compare", compare)


def whole_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors have taken in what came behind the row."""
    monkeypatch.setattr(SessionState, "_unread_path", lambda self, node: self.tree.committed[self.followed_tokens :])


@pytest.mark.parametrize(
    ("mutant", "sampling"),
    [(own_noise, "T .8"), (neighbour, "T .8"), (neighbour, "greedy"), (whole_history, "greedy, penalised")],
    ids=["own noise", "neighbour's token", "neighbour's token, greedy", "processed with later tokens"],
)
async def test_the_comparison_catches(monkeypatch: pytest.MonkeyPatch, mutant: Any, sampling: str) -> None:
    async with services("table") as (draft, target):
        text = await written(draft, target, 1, SAMPLINGS[sampling], Acceptance.COUPLED)
        check_coupled(text, await shadowed(draft, 2, text.ids, SAMPLINGS[sampling], Acceptance.COUPLED))
        mutant(monkeypatch)
        standings = await shadowed(draft, 3, text.ids, SAMPLINGS[sampling], Acceptance.COUPLED)
    with pytest.raises(AssertionError):
        check_coupled(text, standings)


def by_q_alone(ids: list[int], sampling: SamplingParams) -> Standings:
    """What the draft's q says of each token, computed without any service."""
    law, standings = TableModel(DRAFT), Standings()
    for position in range(len(PREFIX), len(ids)):
        support = sparse_support(processed_scores(law.logits(ids[:position])[np.newaxis], sampling)[0])
        order = sorted(zip(support.token_ids, support.probabilities, strict=True), key=lambda pair: -pair[1])
        ranks = {token: rank for rank, (token, _) in enumerate(order, start=1)}
        standings[position] = ranks.get(ids[position], 0), float(np.float32(support.probability(ids[position])))
    return standings


@pytest.mark.parametrize("acceptance", [Acceptance.REJECTION, pytest.param(Acceptance.BLOCK, marks=pytest.mark.full)])
async def test_no_noise_and_no_dropped_token_has_a_say_where_it_may_not(acceptance: Acceptance) -> None:
    sampling = SAMPLINGS["T .8"]
    async with services("table") as (draft, target):
        text = await written(draft, target, 1, sampling, acceptance)
        for_free = take_standings(draft, 1)
        standings = await shadowed(draft, 2, text.ids, sampling, acceptance)
    assert standings == by_q_alone(text.ids, sampling)
    assert not all(text.accepted.values()), "something was dropped"
    assert for_free == {position: standings[position] for position in for_free}
    assert for_free.keys() >= text.accepted.keys()


async def test_that_comparison_catches_an_order_by_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    def raced(self: PreDrawnDraws, distribution: Distribution, token: int) -> Standing:
        first = race(self._scores(distribution), self.noise, Stream.DRAFT, 0)
        return Standing(int(first == token), 0.5)

    monkeypatch.setattr(PreDrawnDraws, "standing", raced)
    ids = [*PREFIX, *range(20)]
    async with linked_draft(TableEngine(DRAFT)) as draft:
        standings = await shadowed(draft, 1, ids, SAMPLINGS["T .8"], Acceptance.REJECTION)
    assert standings != by_q_alone(ids, SAMPLINGS["T .8"])


def logit_rows(engine: RecordingEngine) -> list[int]:
    """Positions of the rows whose logits a step asked for, of a session that proposes nothing."""
    return [item.base_length + row for plan in engine.plans for item in plan.items for row in item.logit_rows]


async def test_only_what_is_asked_for_is_computed() -> None:
    """No logits of the prompt but the last, none of a commit whose shadow nobody wants."""
    engine = RecordingEngine()
    async with linked_draft(engine, prefill_chunk=4) as events:
        events.send(draft_open(1, PREFIX, DraftBudget(), takes_shadows=True))
        await events.answer(Commit(1, Outcome(4, ROOT, 8), (7, 8), 5, DraftBudget()), DraftOpened)
        assert engine.plans == []
        events.send(Commit(1, Outcome(6, ROOT, 11), (9, 10, 11), 7, SHADOW))
        assert [*await standings_until(events, 10)] == [7, 8, 9]
        await eventually(lambda: 9 in logit_rows(engine), "the last token's row")
    assert logit_rows(engine) == [6, 7, 8, 9]
    assert max(plan.rows for plan in engine.plans) == 4


async def test_an_open_that_asks_has_its_prefix_computed(engine: RecordingEngine, draft: Events) -> None:
    draft.send(draft_open(1, PREFIX, SHADOW, takes_shadows=True))
    await eventually(lambda: logit_rows(engine) == [len(PREFIX) - 1], "the prefix's rows, the last with logits")
    engine.plans.clear()
    draft.send(Commit(1, Outcome(4, ROOT, 7), (7,), 5, SHADOW))
    assert [*await standings_until(draft, 6)] == [5]
    await eventually(lambda: logit_rows(engine) == [5], "the token's row, for the next one")


async def test_a_round_that_leaves_does_not_end_the_catching_up(engine: RecordingEngine, draft: Events) -> None:
    await draft.open(draft_open(1, PREFIX, DraftBudget(), takes_shadows=True))
    for budget in (DraftBudget(), DraftBudget(max_tokens=2, fan_out=2)):
        at = len(PREFIX) + 2 * (budget.fan_out > 0)
        engine.go.clear()
        draft.send(Commit(1, Outcome(at - 1, ROOT, 8), (7, 8), at, SHADOW), Verifying(1, at + 1, budget=budget))
        engine.go.set()
        assert [*await standings_until(draft, at + 2)] == [at, at + 1]


async def test_a_coordinator_that_does_not_know_shadows_gets_none(draft: Events) -> None:
    await draft.answer(draft_open(1, PREFIX, K1), DraftedProposal)
    await draft.answer(Commit(1, Outcome(4, ROOT, 8), (7, 8), 5, K1), DraftedProposal)
    assert not draft.has(Shadow)
