"""Shadows as they arrive at a coordinator: which are reported, and which end the draft's session."""

from __future__ import annotations

import pytest

from paceline.protocol.draft import DraftOpen, Shadow
from paceline.protocol.session import Close
from tests.coordinator.requests import PROMPT, DraftedRequest


class ShadowedRequest(DraftedRequest):
    """A request whose draft was told some tokens, and what its session reports from then on."""

    def __init__(self, *tokens: int) -> None:
        super().__init__()
        self.shadows: list[Shadow] = []
        self.drafting._session.on_shadow = self.shadows.append
        self.advance(tokens)

    def sends(self, first: int, ranks: int, session: int = 1) -> Shadow:
        """A shadow arrives."""
        shadow = Shadow(session, first, (1,) * ranks, (0.5,) * ranks)
        self.link.on_event(shadow)
        return shadow


def test_shadows_of_what_the_draft_was_told_are_reported_in_order() -> None:
    request = ShadowedRequest(5, 6, 7, 8)
    (opened,) = request.link.take_only(DraftOpen)
    assert opened.takes_shadows
    first = len(PROMPT)
    assert [request.sends(first, 2), request.sends(first + 3, 1)] == request.shadows
    assert Close not in request.link.take_kinds()
    request.sends(first + 3, 1)
    assert len(request.shadows) == 2, "a position is reported once"
    assert Close in request.link.take_kinds()


@pytest.mark.parametrize(
    ("first", "ranks"),
    [(len(PROMPT) - 1, 1), (len(PROMPT), 3), (len(PROMPT) + 2, 1), (len(PROMPT) + 3, 1)],
    ids=["of the prompt", "beyond what the draft was told", "not told", "not committed"],
)
def test_a_shadow_of_other_positions_ends_the_draft(first: int, ranks: int, caplog: pytest.LogCaptureFixture) -> None:
    request = ShadowedRequest(5, 6)
    request.commit((7,))
    request.link.take()
    request.sends(first, ranks)
    assert request.shadows == []
    assert request.link.take_kinds() == [Close]
    assert f"malformed shadow: positions = [{first}, {first + ranks})" in caplog.text


def test_a_session_opened_anew_reports_behind_its_prefix() -> None:
    request = ShadowedRequest(5, 6)
    request.sends(len(PROMPT), 3)
    assert request.link.take_kinds()[-1] is Close
    request.drafting._session._retry_at.clear()
    request.advance((7,))
    assert DraftOpen in request.link.take_kinds()
    request.advance((8, 9))
    last = len(request.sequence.ids)
    assert [request.sends(last - 2, 2, session=2)] == request.shadows
    request.link.take_kinds()
    request.sends(last - 3, 1, session=2)
    assert request.link.take_kinds() == [Close], "a position of the prefix"
