"""Shadows over real gRPC: what a draft says where it proposed nothing is what its proposals would have been."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
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
    draft_link,
    draft_open,
    draft_service,
    eventually,
    linked,
    target_link,
    target_open,
    target_service,
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
RULES = [Acceptance.REJECTION, Acceptance.BLOCK]


def tiny_engine(disturb: float) -> Engine:
    """A transformer of a few thousand weights, to which so much noise is added; each service has one of its own."""
    transformer = tiny.random_model(tiny.llama())
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        for weights in transformer.parameters():
            weights.add_(disturb * torch.randn_like(weights))
    wanted = EngineSettings(threads=1, kv_bytes=1 << 22)
    return build_engine(transformer, TableTokenizer(tiny.VOCAB, None), wanted, "tiny")


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


def standings(shadow: Shadow) -> Iterator[tuple[int, tuple[int, float]]]:
    pairs = zip(shadow.ranks, shadow.probabilities, strict=True)
    return enumerate(pairs, start=shadow.first_position)


def taken(events: Events, session: int) -> Standings:
    """All shadows of a session that have come; each position once, in order."""
    found: Standings = {}
    for event in [each for each in events._events if isinstance(each, Shadow) and each.session_id == session]:
        events._events.remove(event)
        for position, standing in standings(event):
            assert position > max(found, default=0), "ascending"
            found[position] = standing
    return found


async def standings_until(events: Events, end: int, session: int = 1) -> Standings:
    """All shadows of a session, once the one of the last position before `end` has come."""

    def complete() -> bool:
        shadows = (each for each in events._events if isinstance(each, Shadow))
        return any(each.session_id == session and each.end == end for each in shadows)

    await eventually(complete, f"the shadow of position {end - 1}")
    return taken(events, session)


async def written(
    draft: Events, target: Events, session: int, sampling: SamplingParams, acceptance: Acceptance
) -> Text:
    """A text in rounds of one proposed token each."""
    text = Text()
    key = draft_key(NOISE, acceptance)
    facts = {"sampling": sampling, "acceptance": acceptance}
    opened = draft_open(session, PREFIX, K1, noise=key, **facts)
    draft.link.send(replace(opened, takes_shadows=True))
    target.link.send(target_open(session, PREFIX, **facts))
    node = ROOT
    while len(text.ids) < len(PREFIX) + LENGTH:
        drafted = await draft.of(DraftedProposal, session)
        text.proposals.append(drafted.proposal)
        round_ = Round(session, len(text.ids) - 1, node, (text.ids[-1],), drafted.proposal)
        decision: Decision = decide(acceptance, round_, await verdict_of(target, round_), NOISE)
        text.accepted[len(text.ids)] = bool(decision.accepted)
        node, new = decision.node, (*decision.accepted, decision.next_token)
        outcome = Outcome(len(text.ids) - 1, node, new[-1])
        draft.link.send(Commit(session, outcome, new, len(text.ids), K1))
        text.ids += new
    await draft.of(DraftedProposal, session)
    return text


async def shadowed(
    draft: Events, session: int, text: list[int], sampling: SamplingParams, acceptance: Acceptance, **changes: Any
) -> Standings:
    """The shadow of a text for which nothing is proposed, committed in pieces."""
    key = draft_key(NOISE, acceptance)
    facts = {"noise": key, "sampling": sampling, "acceptance": acceptance} | changes
    draft.link.send(replace(draft_open(session, PREFIX, DraftBudget(), **facts), takes_shadows=True))
    source, at = random.Random(session), len(PREFIX)
    while at < len(text):
        piece = tuple(text[at : at + source.randint(1, 7)])
        draft.link.send(Commit(session, Outcome(at - 1, ROOT, piece[-1]), piece, at, SHADOW))
        at += len(piece)
    found = await standings_until(draft, len(text), session)
    draft.link.send(Close(session))
    return found


@asynccontextmanager
async def services(kind: str) -> AsyncIterator[tuple[Events, Events]]:
    draft, target = engines(kind)
    async with (
        draft_service(draft) as (_, draft_address),
        target_service(target) as (_, target_address),
        linked(draft_link(draft_address)) as from_draft,
        linked(target_link(target_address)) as from_target,
    ):
        yield from_draft, from_target


def check_coupled(text: Text, found: Standings) -> None:
    """Rank 1 is what was accepted, and the probability that of the proposal."""
    assert [*found] == [*range(len(PREFIX), len(text.ids))], "every position, once"
    for (position, accepted), proposal in zip(text.accepted.items(), text.proposals, strict=True):
        rank, probability = found[position]
        assert (rank == 1) == accepted, f"position {position}: rank {rank}, accepted: {accepted}"
        assert probability == pytest.approx(proposal.draft_probabilities[0], rel=1e-3)


@pytest.mark.parametrize("kind", ["table", "tiny transformer"])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=[*SAMPLINGS])
async def test_a_shadow_says_what_would_have_been_accepted(kind: str, sampling: SamplingParams) -> None:
    async with services(kind) as (draft, target):
        text = await written(draft, target, 1, sampling, Acceptance.COUPLED)
        for_free = taken(draft, 1)
        found = await shadowed(draft, 2, text.ids, sampling, Acceptance.COUPLED)
    check_coupled(text, found)
    assert [*text.accepted] == [position for position in for_free if position in text.accepted]
    for position, (rank, probability) in for_free.items():
        assert rank == found[position][0], "also where it costs nothing"
        assert probability == pytest.approx(found[position][1], rel=1e-3)
    assert 5 < sum(text.accepted.values()) < len(text.accepted) - 5, "both kinds are seen"
    assert len({rank for rank, _ in found.values()}) > 3


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
        found = await shadowed(draft, 3, text.ids, SAMPLINGS[sampling], Acceptance.COUPLED)
    with pytest.raises(AssertionError):
        check_coupled(text, found)


def by_q_alone(ids: list[int], sampling: SamplingParams) -> Standings:
    """What the draft's q says of each token, computed without any service."""
    law, found = TableModel(DRAFT), Standings()
    for position in range(len(PREFIX), len(ids)):
        support = sparse_support(processed_scores(law.logits(ids[:position])[np.newaxis], sampling)[0])
        order = sorted(zip(support.token_ids, support.probabilities, strict=True), key=lambda pair: -pair[1])
        ranks = {token: rank for rank, (token, _) in enumerate(order, start=1)}
        found[position] = ranks.get(ids[position], 0), float(np.float32(support.probability(ids[position])))
    return found


@pytest.mark.parametrize("acceptance", RULES)
async def test_no_noise_and_no_dropped_token_has_a_say_where_it_may_not(acceptance: Acceptance) -> None:
    sampling = SAMPLINGS["T .8"]
    async with services("table") as (draft, target):
        text = await written(draft, target, 1, sampling, acceptance)
        for_free = taken(draft, 1)
        found = await shadowed(draft, 2, text.ids, sampling, acceptance)
    assert found == by_q_alone(text.ids, sampling)
    assert not all(text.accepted.values()), "something was dropped"
    assert for_free == {position: found[position] for position in for_free}
    assert for_free.keys() >= text.accepted.keys()


@pytest.mark.parametrize("acceptance", RULES)
async def test_that_comparison_catches_an_order_by_noise(
    monkeypatch: pytest.MonkeyPatch, acceptance: Acceptance
) -> None:
    def raced(self: PreDrawnDraws, distribution: Distribution, token: int) -> Standing:
        first = race(self._scores(distribution), self.noise, Stream.DRAFT, 0)
        return Standing(int(first == token), 0.5)

    monkeypatch.setattr(PreDrawnDraws, "standing", raced)
    async with services("table") as (draft, _):
        ids = [*PREFIX, *range(20)]
        found = await shadowed(draft, 1, ids, SAMPLINGS["T .8"], acceptance)
    assert found != by_q_alone(ids, SAMPLINGS["T .8"])


def logit_rows(engine: RecordingEngine) -> list[int]:
    """Positions of the rows whose logits a step asked for, of a session that proposes nothing."""
    return [item.base_length + row for plan in engine.plans for item in plan.items for row in item.logit_rows]


async def test_only_what_is_asked_for_is_computed() -> None:
    """No logits of the prompt but the last, none of a commit whose shadow nobody wants."""
    engine = RecordingEngine()
    async with draft_service(engine, prefill_chunk=4) as (_, address), linked(draft_link(address)) as events:
        events.link.send(replace(draft_open(1, PREFIX, DraftBudget()), takes_shadows=True))
        events.link.send(Commit(1, Outcome(4, ROOT, 8), (7, 8), 5, DraftBudget()))
        await events.of(DraftOpened, 1)
        assert engine.plans == []
        events.link.send(Commit(1, Outcome(6, ROOT, 11), (9, 10, 11), 7, SHADOW))
        found = await standings_until(events, 10)
        await eventually(lambda: 9 in logit_rows(engine), "the last token's row")
    assert [*found] == [7, 8, 9]
    assert logit_rows(engine) == [6, 7, 8, 9]
    assert max(plan.rows for plan in engine.plans) == 4


async def test_an_open_that_asks_has_its_prefix_computed() -> None:
    engine = RecordingEngine()
    async with draft_service(engine) as (_, address), linked(draft_link(address)) as events:
        events.link.send(replace(draft_open(1, PREFIX, SHADOW), takes_shadows=True))
        await eventually(lambda: logit_rows(engine) == [len(PREFIX) - 1], "the prefix's rows, the last with logits")
        engine.plans.clear()
        events.link.send(Commit(1, Outcome(4, ROOT, 7), (7,), 5, SHADOW))
        assert [*await standings_until(events, 6)] == [5]
        await eventually(lambda: logit_rows(engine) == [5], "the token's row, for the next one")


async def test_a_round_that_leaves_does_not_end_the_catching_up() -> None:
    engine = RecordingEngine()
    async with draft_service(engine) as (_, address), linked(draft_link(address)) as events:
        events.link.send(replace(draft_open(1, PREFIX, DraftBudget()), takes_shadows=True))
        await events.of(DraftOpened, 1)
        for budget in (DraftBudget(), DraftBudget(max_tokens=2, fan_out=2)):
            at = len(PREFIX) + 2 * (budget.fan_out > 0)
            engine.go.clear()
            events.link.send(Commit(1, Outcome(at - 1, ROOT, 8), (7, 8), at, SHADOW))
            events.link.send(Verifying(1, at + 1, budget=budget))
            engine.go.set()
            found = await standings_until(events, at + 2)
            assert [*found] == [at, at + 1]


async def test_a_coordinator_that_does_not_know_shadows_gets_none() -> None:
    async with draft_service(RecordingEngine()) as (_, address), linked(draft_link(address)) as events:
        events.link.send(draft_open(1, PREFIX, K1))
        await events.of(DraftedProposal, 1)
        events.link.send(Commit(1, Outcome(4, ROOT, 8), (7, 8), 5, K1))
        await events.of(DraftedProposal, 1)
        assert not events.has(Shadow)
