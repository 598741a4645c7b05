"""When a proposal is begun whose drafter reads features: once they are there, or late, over real gRPC."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draft_service import feature_waits
from paceline.protocol.draft import DraftBudget, DraftedProposal, DraftOpened, Shadow, Verifying
from paceline.protocol.proposal import ROOT
from tests.services.feature_spy import FeatureSpy
from tests.services.harness import RecordingEngine, draft_link, draft_open, draft_service, eventually, linked
from tests.services.test_draft import K4, commit_of
from tests.services.test_draft_features import PREFIX, TEXT, features

NEVER_S = 3600.0


def patience(monkeypatch: pytest.MonkeyPatch, *, prompt: float = NEVER_S, round_: float = NEVER_S) -> None:
    monkeypatch.setattr(feature_waits, "PROMPT_PATIENCE_S", prompt)
    monkeypatch.setattr(feature_waits, "ROUND_PATIENCE_S", round_)


async def test_a_proposal_waits_for_the_features_of_its_own_session(monkeypatch: pytest.MonkeyPatch) -> None:
    patience(monkeypatch)
    engine = RecordingEngine()
    spy = FeatureSpy(engine)
    async with draft_service(engine, drafter=spy) as (_, address), linked(draft_link(address)) as events:
        events.link.send(draft_open(1, PREFIX, K4))
        events.link.send(features(0, 3))  # all but the last are wanted
        events.link.send(draft_open(2, PREFIX, K4))
        events.link.send(features(0, 4, session=2))
        await events.of(DraftedProposal, 2)
        assert [*spy.begun] == [max(spy.texts)], "the first session is open, and waits"
        events.link.send(features(3, 4))
        drafted = await events.of(DraftedProposal, 1)
        assert drafted.proposal.token_ids == TEXT[5:9]
        events.link.send(commit_of(1, list(PREFIX), 3, list(TEXT[5:10])), urgent=True)
        events.link.send(features(4, 9))
        assert (await events.of(DraftedProposal, 1)).proposal.token_ids == TEXT[10:14]


async def test_a_wait_in_vain_is_the_last_until_features_come(monkeypatch: pytest.MonkeyPatch) -> None:
    patience(monkeypatch, prompt=0.01)
    engine = RecordingEngine()
    spy = FeatureSpy(engine)
    async with draft_service(engine, drafter=spy) as (_, address), linked(draft_link(address)) as events:
        events.link.send(draft_open(1, PREFIX, K4))
        await events.of(DraftedProposal, 1)
        patience(monkeypatch)
        events.link.send(commit_of(1, list(PREFIX), 0, list(TEXT[5:7])))
        await events.of(DraftedProposal, 1)
        events.link.send(features(0, 3))
        await eventually(lambda: any(spy.taken.values()), "they come again")
        events.link.send(commit_of(1, list(TEXT[:7]), 0, list(TEXT[7:9])))
        events.link.send(draft_open(2, PREFIX, DraftBudget()))
        await events.of(DraftOpened, 2)
        assert len(spy.begun) == 2, "the third is held"


async def test_a_deadline_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    patience(monkeypatch)
    engine = RecordingEngine()
    async with (
        draft_service(engine, drafter=FeatureSpy(engine)) as (_, address),
        linked(draft_link(address)) as events,
    ):
        events.link.send(draft_open(1, PREFIX, DraftBudget(max_tokens=4, deadline_ms=20)))
        await events.of(DraftedProposal, 1)


async def test_a_shadow_outlives_the_round_and_a_proposal_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    patience(monkeypatch)
    engine = RecordingEngine()
    spy = FeatureSpy(engine)
    async with draft_service(engine, drafter=spy) as (_, address), linked(draft_link(address)) as events:
        events.link.send(replace(draft_open(1, PREFIX, K4), takes_shadows=True))
        events.link.send(Verifying(1, len(PREFIX) - 1))
        events.link.send(features(0, 4))
        shadow = DraftBudget(shadow=True)
        events.link.send(commit_of(1, list(PREFIX), ROOT, [TEXT[5]], budget=shadow))
        events.link.send(Verifying(1, len(PREFIX)))
        events.link.send(features(4, 5))
        said = await events.of(Shadow, 1)
        assert said.first_position == len(PREFIX)
        assert spy.begun == [], "the round left without its proposal"


async def test_a_speculation_takes_the_place_of_a_held_shadow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session does one thing at a time: a step that has it twice would fail."""
    patience(monkeypatch)
    engine = RecordingEngine()
    async with (
        draft_service(engine, drafter=FeatureSpy(engine)) as (_, address),
        linked(draft_link(address)) as events,
    ):
        events.link.send(draft_open(1, PREFIX, DraftBudget()))
        shadow = DraftBudget(shadow=True)
        events.link.send(commit_of(1, list(PREFIX), ROOT, [TEXT[5]], budget=shadow))
        ahead = Verifying(1, len(PREFIX), budget=DraftBudget(max_tokens=4, fan_out=2))
        events.link.send(ahead)
        events.link.send(features(0, 5))
        assert (await events.of(DraftedProposal, 1)).outcome is not None
        events.link.send(commit_of(1, list(TEXT[:6]), ROOT, [TEXT[6]]))
        events.link.send(features(5, 6))
        assert (await events.of(DraftedProposal, 1)).proposal.token_ids
