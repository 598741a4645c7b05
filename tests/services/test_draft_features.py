"""Features that a draft service is sent, over real gRPC: of what is committed, to drafters that wait for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from draft_service import scheduler
from paceline.engine.features import encode_features
from paceline.engine.table.engine import table_features
from paceline.protocol.draft import DraftBudget, DraftedProposal, Shadow, Verifying
from paceline.protocol.features import Features, FeatureType
from paceline.protocol.proposal import ROOT
from paceline.protocol.session import Failure
from tests.services.feature_spy import NEED, FeatureSpy, misplaced, positions
from tests.services.harness import Events, draft_open, eventually
from tests.services.test_draft import K4, OWN, PREFIX, commit_of

TEXT = (*PREFIX, *OWN[:10])
NONE = DraftBudget()
SHADOW = DraftBudget(shadow=True)
NEVER_S = 3600.0


def features(first: int, end: int, session: int = 1, dtype: FeatureType = FeatureType.FLOAT16) -> Features:
    rows = np.stack([table_features(TEXT[: position + 1], NEED) for position in range(first, end)])
    (message,) = encode_features(session, first, rows, len(NEED.layers), dtype)
    return message


async def test_rows_reach_the_drafter_in_order_with_their_commits(spy: FeatureSpy, spied: Events) -> None:
    """Early, lost and repeated ones, too: the spy notes them only if they are of committed tokens."""
    welcome = spied.link.welcome
    assert welcome is not None
    assert (welcome.drafters, welcome.need_of(""), welcome.need_of("model")) == (("model",), NEED, NEED)
    spied.send(draft_open(1, PREFIX, K4), features(0, 3))
    spied.send(features(3, 8))  # three of them are not committed yet
    await spied.of(DraftedProposal, 1)
    spied.send(commit_of(1, PREFIX, 3, TEXT[5:10]), urgent=True)
    spied.send(features(7, 9))  # two are lost
    spied.send(features(3, 5))  # twice
    await spied.of(DraftedProposal, 1)
    rows = spy.taken[min(spy.taken)]
    await eventually(lambda: len(rows) == 4, "all have come")
    assert positions(rows) == [0, 1, 2, 3, 4, 7, 8, 3, 4]
    assert misplaced(rows, TEXT) == []


@pytest.mark.parametrize(
    ("change", "reason", "closes"),
    [
        ({"shape": (1, 2, 8), "data": bytes(32)}, "features layers = 2: must be 3, those of", False),
        ({"data": np.full(24, np.nan, "<f2").tobytes()}, "feature values = 'not finite': must be finite", True),
    ],
)
async def test_rows_that_cannot_be_read_are_refused_by_name(
    change: dict[str, Any], reason: str, closes: bool, spy: FeatureSpy, spied: Events
) -> None:
    await spied.open(draft_open(1, PREFIX, NONE))
    failure = await spied.answer(replace(features(0, 1), **change), Failure)
    assert reason in failure.message
    assert failure.session_closed is closes
    spied.send(draft_open(2, PREFIX, K4), features(0, 5, session=2, dtype=FeatureType.INT8))
    drafted = await spied.of(DraftedProposal, 2)
    assert drafted.proposal.token_ids == TEXT[5:9], "the next session drafts as ever"
    rows = spy.taken[max(spy.taken)]
    await eventually(lambda: positions(rows) == [*range(5)], "and is given its rows")
    assert misplaced(rows, TEXT, within=0.04) == []


async def test_a_drafter_that_reads_none_is_given_none(draft: Events) -> None:
    assert draft.link.welcome is not None
    assert not draft.link.welcome.need_of("").any
    draft.send(draft_open(1, PREFIX, NONE))
    failure = await draft.answer(features(0, 3), Failure)
    assert "features = 'of 3 layers': must be none: model reads none" in failure.message


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A service that waits for features for ever."""
    monkeypatch.setattr(scheduler, "PROMPT_PATIENCE_S", NEVER_S)
    monkeypatch.setattr(scheduler, "ROUND_PATIENCE_S", NEVER_S)
    return monkeypatch


@pytest.mark.usefixtures("patience")
async def test_a_proposal_waits_for_the_features_of_its_own_session(spy: FeatureSpy, spied: Events) -> None:
    spied.send(draft_open(1, PREFIX, K4))
    spied.send(features(0, 3))  # all but the last that it waits for
    spied.send(draft_open(2, PREFIX, K4), features(0, 4, session=2))
    await spied.of(DraftedProposal, 2)
    assert spy.begun == [max(spy.texts)], "the first session is open, and waits"
    spied.send(features(3, 4))
    assert (await spied.of(DraftedProposal, 1)).proposal.token_ids == TEXT[5:9]
    spied.send(commit_of(1, PREFIX, 3, TEXT[5:10]), urgent=True)
    spied.send(features(4, 9))
    assert (await spied.of(DraftedProposal, 1)).proposal.token_ids == TEXT[10:14]


async def test_a_wait_in_vain_is_the_last_until_features_come(
    spy: FeatureSpy, spied: Events, patience: pytest.MonkeyPatch
) -> None:
    with patience.context() as short:
        short.setattr(scheduler, "PROMPT_PATIENCE_S", 0.01)
        await spied.proposal(draft_open(1, PREFIX, K4))
    await spied.proposal(commit_of(1, PREFIX, 0, TEXT[5:7]))
    spied.send(features(0, 3))
    await eventually(lambda: any(spy.taken.values()), "they come again")
    spied.send(commit_of(1, TEXT[:7], 0, TEXT[7:9]))
    await spied.open(draft_open(2, PREFIX, NONE))
    assert len(spy.begun) == 2, "the third waits"


@pytest.mark.usefixtures("patience")
async def test_a_deadline_ends_the_wait(spied: Events) -> None:
    await spied.proposal(draft_open(1, PREFIX, DraftBudget(max_tokens=4, deadline_ms=20)))


@pytest.mark.usefixtures("patience")
async def test_a_shadow_outlives_the_round_and_a_proposal_does_not(spy: FeatureSpy, spied: Events) -> None:
    spied.send(draft_open(1, PREFIX, K4, takes_shadows=True), Verifying(1, len(PREFIX) - 1), features(0, 4))
    spied.send(commit_of(1, PREFIX, ROOT, TEXT[5:6], SHADOW), Verifying(1, len(PREFIX)), features(4, 5))
    assert (await spied.of(Shadow, 1)).first_position == len(PREFIX)
    assert spy.begun == [], "the round left without its proposal"


@pytest.mark.usefixtures("patience")
async def test_a_speculation_takes_the_place_of_a_shadow_that_waits(spied: Events) -> None:
    """A session does one thing at a time: a step that has it twice would fail."""
    spied.send(draft_open(1, PREFIX, NONE), commit_of(1, PREFIX, ROOT, TEXT[5:6], SHADOW))
    spied.send(Verifying(1, len(PREFIX), budget=DraftBudget(max_tokens=4, fan_out=2)), features(0, 5))
    assert (await spied.of(DraftedProposal, 1)).outcome is not None
    spied.send(commit_of(1, TEXT[:6], ROOT, TEXT[6:7]), features(5, 6))
    assert (await spied.of(DraftedProposal, 1)).proposal.token_ids
