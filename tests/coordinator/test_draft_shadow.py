"""Shadows as they arrive at a coordinator: which are reported, and which end the draft's session."""

from __future__ import annotations

import pytest

from paceline.protocol.draft import Commit, DraftOpen, Shadow
from paceline.protocol.session import Close
from tests.coordinator.requests import PROMPT, DraftedRequest


def heard(request: DraftedRequest) -> list[Shadow]:
    """What the request's session reports from now on."""
    shadows: list[Shadow] = []
    request.drafting._session.on_shadow = shadows.append
    return shadows


def sends(request: DraftedRequest, first: int, ranks: int, session: int = 1) -> Shadow:
    """A shadow arrives."""
    shadow = Shadow(session, first, (1,) * ranks, (0.5,) * ranks)
    request.link.on_event(shadow)
    return shadow


def test_shadows_of_what_the_draft_was_told_are_reported_in_order() -> None:
    request = DraftedRequest()
    shadows = heard(request)
    (opened,) = request.link.take_only(DraftOpen)
    assert opened.takes_shadows
    request.advance((5, 6, 7, 8))
    first = len(PROMPT)
    assert [sends(request, first, 2), sends(request, first + 3, 1)] == shadows
    assert Close not in request.link.take_kinds()


@pytest.mark.parametrize(
    ("first", "ranks"),
    [(len(PROMPT) - 1, 1), (len(PROMPT), 3), (len(PROMPT) + 2, 1)],
    ids=["of the prompt", "beyond what the draft was told", "not committed"],
)
def test_a_shadow_of_other_positions_ends_the_draft(first: int, ranks: int, caplog: pytest.LogCaptureFixture) -> None:
    request = DraftedRequest()
    shadows = heard(request)
    request.advance((5, 6))
    request.link.take_kinds()
    sends(request, first, ranks)
    assert shadows == []
    assert request.link.take_kinds() == [Close]
    assert f"malformed shadow: positions = [{first}, {first + ranks})" in caplog.text


def test_a_position_is_reported_once() -> None:
    request = DraftedRequest()
    shadows = heard(request)
    request.advance((5, 6))
    shadow = sends(request, len(PROMPT), 2)
    sends(request, len(PROMPT) + 1, 1)
    assert shadows == [shadow]
    assert Close in request.link.take_kinds()


def test_what_was_committed_but_not_told_is_no_position_of_the_draft() -> None:
    request = DraftedRequest()
    shadows = heard(request)
    request.commit((5, 6))
    assert Commit not in request.link.take_kinds()
    sends(request, len(PROMPT), 2)
    assert shadows == []
    assert Close in request.link.take_kinds()


def test_a_session_opened_anew_reports_behind_its_prefix() -> None:
    request = DraftedRequest()
    shadows = heard(request)
    request.advance((5, 6))
    sends(request, len(PROMPT), 3)
    assert request.link.take_kinds()[-1] is Close
    request.drafting._session._retry_at.clear()
    request.advance((7,))
    assert DraftOpen in request.link.take_kinds()
    request.advance((8, 9))
    last = len(request.sequence.ids)
    assert [sends(request, last - 2, 2, session=2)] == shadows
    request.link.take_kinds()
    sends(request, last - 3, 1, session=2)
    assert request.link.take_kinds() == [Close], "a position of the prefix"
