"""Shadows as they arrive at a coordinator: which are reported, and which end the draft's session."""

from __future__ import annotations

from typing import Any, cast

import pytest

from paceline.protocol.draft import Commit, DraftOpen, Shadow
from paceline.protocol.session import Close
from tests.coordinator.test_drafting import PROMPT, Request


def heard(request: Request) -> list[Shadow]:
    """What the request's session reports from now on."""
    found: list[Shadow] = []
    request.drafting._session.on_shadow = found.append
    return found


def sends(request: Request, first: int, ranks: int, session: int = 1) -> Shadow:
    """A shadow arrives."""
    shadow = Shadow(session, first, (1,) * ranks, (0.5,) * ranks)
    cast(Any, request.link).on_event(shadow)
    return shadow


def test_shadows_of_what_the_draft_was_told_are_reported_in_order() -> None:
    request = Request()
    found = heard(request)
    (opened,) = [each for each in request.link.sent if isinstance(each, DraftOpen)]
    assert opened.takes_shadows
    request.commit((5, 6, 7, 8))
    request.dispatched()
    first = len(PROMPT)
    assert [sends(request, first, 2), sends(request, first + 3, 1)] == found
    assert Close not in request.link.take()


@pytest.mark.parametrize(
    ("first", "ranks"),
    [(len(PROMPT) - 1, 1), (len(PROMPT), 3), (len(PROMPT) + 2, 1)],
    ids=["of the prompt", "beyond what the draft was told", "not committed"],
)
def test_a_shadow_of_other_positions_ends_the_draft(first: int, ranks: int, caplog: pytest.LogCaptureFixture) -> None:
    request = Request()
    found = heard(request)
    request.commit((5, 6))
    request.dispatched()
    request.link.take()
    sends(request, first, ranks)
    assert found == []
    assert request.link.take() == [Close]
    assert f"malformed shadow: positions = [{first}, {first + ranks})" in caplog.text


def test_a_position_is_reported_once() -> None:
    request = Request()
    found = heard(request)
    request.commit((5, 6))
    request.dispatched()
    shadow = sends(request, len(PROMPT), 2)
    sends(request, len(PROMPT) + 1, 1)
    assert found == [shadow]
    assert Close in request.link.take()


def test_what_was_committed_but_not_told_is_no_position_of_the_draft() -> None:
    request = Request()
    found = heard(request)
    request.commit((5, 6))
    assert Commit not in request.link.take()
    sends(request, len(PROMPT), 2)
    assert found == []
    assert Close in request.link.take()


def test_a_session_opened_anew_reports_behind_its_prefix() -> None:
    request = Request()
    found = heard(request)
    request.commit((5, 6))
    request.dispatched()
    sends(request, len(PROMPT), 3)
    assert request.link.take()[-1] is Close
    request.drafting._session._retry_at.clear()
    request.commit((7,))
    request.dispatched()
    assert DraftOpen in request.link.take()
    request.commit((8, 9))
    request.dispatched()
    last = len(request.sequence.ids)
    assert [sends(request, last - 2, 2, session=2)] == found
    request.link.take()
    sends(request, last - 3, 1, session=2)
    assert request.link.take() == [Close], "a position of the prefix"
