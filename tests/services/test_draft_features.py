"""Features that a draft service is sent, over real gRPC: of what is committed, to drafters that read them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.engine.feature_rows import encode_features
from paceline.engine.table.engine import table_features
from paceline.protocol.draft import DraftBudget, DraftedProposal, DraftOpened
from paceline.protocol.features import Features, FeatureType
from paceline.protocol.session import Failure
from tests.services.expected import own_tokens
from tests.services.feature_spy import NEED, FeatureSpy, misplaced, positions
from tests.services.harness import RecordingEngine, draft_link, draft_open, draft_service, eventually, linked
from tests.services.test_draft import K4, commit_of

PREFIX = (1, 2, 3, 4, 5)
TEXT = (*PREFIX, *own_tokens(PREFIX, 10))


def features(first: int, end: int, session: int = 1, dtype: FeatureType = FeatureType.FLOAT16) -> Features:
    rows = np.stack([table_features(TEXT[: position + 1], NEED) for position in range(first, end)])
    (message,) = encode_features(session, first, rows, len(NEED.layers), dtype)
    return message


async def test_rows_reach_the_drafter_in_order_with_the_commits_of_their_tokens() -> None:
    """Early, lost and repeated ones, too: the spy notes them only if they are of committed tokens."""
    engine = RecordingEngine()
    spy = FeatureSpy(engine)
    async with draft_service(engine, drafter=spy) as (_, address), linked(draft_link(address)) as events:
        welcome = events.link.welcome
        assert welcome is not None
        assert (welcome.drafters, welcome.need_of(""), welcome.need_of("model")) == (("model",), NEED, NEED)
        events.link.send(draft_open(1, PREFIX, K4))
        events.link.send(features(0, 3))
        events.link.send(features(3, 8))  # three of them are not committed yet
        await events.of(DraftedProposal, 1)
        events.link.send(commit_of(1, list(PREFIX), 3, list(TEXT[5:10])), urgent=True)
        events.link.send(features(7, 9))  # two are lost
        events.link.send(features(3, 5))  # twice
        await events.of(DraftedProposal, 1)
        session = min(spy.taken)
        await eventually(lambda: len(spy.taken[session]) == 4, "all have come")
        assert positions(spy.taken[session]) == [0, 1, 2, 3, 4, 7, 8, 3, 4]
        assert misplaced(spy.taken[session], TEXT) == []


@pytest.mark.parametrize(
    ("change", "reason", "closes"),
    [
        ({"shape": (1, 2, 8), "data": bytes(32)}, "features layers = 2: must be 3, those of", False),
        ({"data": np.full(24, np.nan, "<f2").tobytes()}, "feature values = 'not finite': must be finite", True),
    ],
)
async def test_rows_that_cannot_be_read_are_refused_by_name(
    change: dict[str, Any], reason: str, closes: bool
) -> None:
    engine = RecordingEngine()
    spy = FeatureSpy(engine)
    async with draft_service(engine, drafter=spy) as (_, address), linked(draft_link(address)) as events:
        events.link.send(draft_open(1, PREFIX, DraftBudget()))
        await events.of(DraftOpened, 1)
        events.link.send(replace(features(0, 1), **change))
        failure = await events.of(Failure, 1)
        assert reason in failure.message
        assert failure.session_closed is closes
        events.link.send(draft_open(2, PREFIX, K4))
        events.link.send(features(0, 5, session=2, dtype=FeatureType.INT8))
        drafted = await events.of(DraftedProposal, 2)
        assert drafted.proposal.token_ids == TEXT[5:9], "the next session drafts as ever"
        session = max(spy.taken)
        await eventually(lambda: positions(spy.taken[session]) == [*range(5)], "and is given its rows")
        assert misplaced(spy.taken[session], TEXT, within=0.04) == []


async def test_a_drafter_that_reads_none_is_given_none() -> None:
    async with draft_service(RecordingEngine()) as (_, address), linked(draft_link(address)) as events:
        assert events.link.welcome is not None
        assert not events.link.welcome.need_of("").any
        events.link.send(draft_open(1, PREFIX, DraftBudget()))
        events.link.send(features(0, 3))
        failure = await events.of(Failure, 1)
        assert "features = 'of 3 layers': must be none: model reads none" in failure.message
