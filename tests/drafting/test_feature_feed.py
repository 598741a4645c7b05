"""A request's features at the coordinator: what it asks for, keeps, and passes on unread."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest

from coordinator.sessions.target import TargetSession
from coordinator.sessions.verified_round import VerifiedRound
from paceline.drafting.feature_feed import FeatureFeed
from paceline.drafting.round_draft import PendingCommit
from paceline.drafting.session import DraftSession
from paceline.protocol.draft import Commit, DraftBudget, DraftOpen
from paceline.protocol.features import FeatureNeed, FeatureOffer, FeatureRequest, Features, FeatureType
from paceline.protocol.proposal import ROOT, Outcome
from paceline.protocol.session import Close
from paceline.protocol.target import TargetOpen
from tests.coordinator.requests import PROMPT, WELCOME, RecordingLink, TargetRequest, draft_pool

NEED = FeatureNeed((1, -2))
OFFER = FeatureOffer(layers=2, hidden=2)
ABLE, UNABLE = replace(WELCOME, features=OFFER), WELCOME
ROW = 8
"""Bytes of two layers of two float16."""


def rows(first: int, end: int, session: int = 1) -> Features:
    """Each row says its position, as often as it is long."""
    data = b"".join(bytes([position]) * ROW for position in range(first, end))
    return Features(session, first, FeatureType.FLOAT16, (end - first, 2, 2), data)


def fed(feed: FeatureFeed, start: int = 0, end: int = 99) -> list[int]:
    """Positions of what the feed passes on; each row must be its own."""
    positions = []
    for each in feed.slice(start, end):
        for row in range(each.rows):
            position = each.first_position + row
            assert each.data[row * ROW : (row + 1) * ROW] == bytes([position]) * ROW
            positions.append(position)
    return positions


def feed_of(need: FeatureNeed = NEED, **settings: Any) -> FeatureFeed:
    feed = FeatureFeed(**settings)
    feed.need = need
    return feed


def test_repeated_and_missing_rows_are_passed_on_once_and_not_at_all() -> None:
    feed = feed_of(prompt_length=3)
    for each in (rows(0, 3), rows(0, 3), rows(2, 5), rows(8, 9), rows(4, 7)):
        feed.take(each)
    assert fed(feed) == [0, 1, 2, 3, 4, 8]
    assert fed(feed, 1, 4) == [1, 2, 3]
    assert feed.total == (3 + 3 + 3 + 1 + 3) * ROW
    assert (feed.take_generated_bytes(), feed.take_generated_bytes()) == ((2 + 1 + 3) * ROW, 0)


def test_the_latest_rows_are_kept_within_a_limit() -> None:
    feed = feed_of(most_bytes=4 * ROW)
    for position in range(9):
        feed.take(rows(position, position + 1))
    assert fed(feed) == [5, 6, 7, 8]


def test_a_target_that_is_opened_again_is_asked_for_what_has_not_come() -> None:
    feed = feed_of()
    assert feed.request(ABLE, 5) == FeatureRequest(NEED)
    feed.take(rows(0, 7))
    assert feed.request(ABLE, 5) == FeatureRequest(NEED, first_position=5), "two were of verdicts that are lost"
    assert fed(feed) == [0, 1, 2, 3, 4]
    feed.take(rows(5, 6))
    assert fed(feed) == [0, 1, 2, 3, 4, 5]
    reads_none = feed_of(FeatureNeed())
    assert reads_none.request(ABLE, 5) is None
    reads_none.take(rows(0, 3))
    assert (fed(reads_none), reads_none.total) == ([], 0)


def test_a_drafter_whose_need_no_target_meets_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    feed, lacking = feed_of(), FeatureNeed((2,))
    assert (feed.meets(NEED), feed.meets(lacking), feed.meets(FeatureNeed())) == (True, False, True)
    feed.check_targets([UNABLE, ABLE])
    assert feed.meets(NEED), "one can"
    with caplog.at_level(logging.WARNING):
        feed.check_targets([UNABLE])
        other = feed_of(lacking)
        other.check_targets([ABLE])
    assert (feed.meets(NEED), feed.meets(FeatureNeed()), other.meets(lacking)) == (False, True, False)
    assert "drafter left out, its requests go without it: layers=(1, -2) reason=the target sends no" in caplog.text
    assert "feature layer = 2: must be below 2" in caplog.text


class Fed:
    """A request whose drafter reads features, on links that only record."""

    def __init__(self, offer: FeatureOffer | None = OFFER) -> None:
        self.draft_link = RecordingLink(drafters=("spy",), drafter_needs=(NEED,))
        self.target = TargetRequest(RecordingLink(features=offer))
        self.target_link, self.ids = self.target.link, self.target.ids
        self.feed = FeatureFeed(len(PROMPT))
        self.draft = DraftSession(draft_pool(self.draft_link), self.target.task, "", self.feed)
        self.feed.need = self.draft.need
        self.target.session = TargetSession(self.target.pool, self.target.task, self.feed)

    async def sends(self) -> tuple[asyncio.Task[VerifiedRound], TargetOpen]:
        """A round that waits for its verdict, and how its session was opened."""
        task = await self.target.pending()
        (opened,) = self.target_link.take_only(TargetOpen)
        return task, opened

    def commit(self, token: int) -> None:
        outcome = Outcome(len(self.ids) - 1, ROOT, token)
        self.ids.append(token)
        self.draft.commit(PendingCommit(outcome, (token,), [*self.ids], DraftBudget(), "", is_awaited=False))

    def take(self) -> list[Any]:
        """What the draft service was sent: kinds of commands, and positions of features with their session."""
        return [
            (each.session_id, each.first_position, each.end) if isinstance(each, Features) else type(each)
            for each in self.draft_link.take()
        ]


async def test_rows_follow_the_commits_of_their_tokens_whichever_comes_first() -> None:
    request = Fed()
    request.draft.open(request.ids, DraftBudget(), "")
    first, opened = await request.sends()
    assert opened.features == FeatureRequest(NEED)
    request.target_link.on_event(rows(0, 2))
    request.target.answer(len(PROMPT) - 1, token=7)
    await first
    request.ids.pop()  # the draft's commit brings it
    request.target_link.on_event(rows(2, 5))
    assert request.take() == [DraftOpen, (1, 0, 2), (1, 2, 3)]
    request.commit(7)
    request.commit(8)
    request.target_link.on_event(rows(4, 5))
    assert request.take() == [Commit, (1, 3, 4), Commit, (1, 4, 5)]


async def test_a_draft_session_that_is_opened_later_or_again_is_given_what_was_kept() -> None:
    request = Fed()
    request.feed.take(rows(0, 3))
    request.draft.open(request.ids, DraftBudget(), "")
    assert request.take() == [DraftOpen, (1, 0, 3)]
    request.draft_link.on_down(request.target_link.why_down())
    request.feed.take(rows(3, 4))
    assert request.take() == []
    request.commit(7)
    assert request.take() == [DraftOpen, (2, 0, 3), (2, 3, 4)]
    request.draft.close()
    request.feed.take(rows(4, 5))
    assert request.take() == [Close]


async def test_without_a_target_that_sends_them_the_drafter_is_not_asked() -> None:
    request = Fed(None)
    request.draft.open(request.ids, DraftBudget(max_tokens=4), "")
    assert (request.take(), request.draft.is_ready) == ([], False)
    sending, opened = await request.sends()
    assert opened.features is None
    sending.cancel()


async def test_a_target_that_is_lost_to_one_that_sends_none_ends_the_draft() -> None:
    request = Fed()
    request.draft.open(request.ids, DraftBudget(), "")
    assert request.feed.request(UNABLE, 3) is None
    request.commit(7)
    assert request.take() == [DraftOpen, Close]
