"""Which of several drafters a request is drafted for with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from unittest import mock

import pytest

from coordinator.policy.acceptance_stats import NgramShadow
from coordinator.policy.choosing import Choosing
from coordinator.policy.planner import Planner, RequestPlanner
from paceline.costs.acceptance import TokenAcceptance
from paceline.costs.running_mean import SPEED_MEMORY
from paceline.costs.service_costs import DraftCosts, DrafterLine, TargetCosts
from paceline.protocol.draft import Shadow
from paceline.protocol.proposal import Acceptance
from paceline.sampling.match import Match
from tests.coordinator.planned import SaidByTarget, line

ROOM = 400
DEFAULT_NAME, OTHER = "auto m", "auto eagle m"


@dataclass(eq=False)
class SaidOfTwo:
    """A draft service with two drafters."""

    default_ms: float = 2.0
    other_ms: float = 2.0

    @property
    def costs(self) -> DraftCosts:
        return DraftCosts(line(self.default_ms, 0.1), others=(DrafterLine("eagle", line(self.other_ms, 0.1)),))


class Case:
    """A request among two drafters, and what is known of them."""

    def __init__(self, default_ms: float = 2.0, other_ms: float = 2.0, *, offered: int = 2) -> None:
        self.planner = Planner()
        self.target, self.draft = SaidByTarget(), SaidOfTwo(default_ms, other_ms)
        self.names = ["", "eagle"][:offered]

    @cached_property
    def request(self) -> RequestPlanner:
        """Begins with what is known by then."""
        made = RequestPlanner(self.planner, DEFAULT_NAME, Acceptance.COUPLED, greedy=True)
        made.move(self.target, self.draft)
        return made

    @cached_property
    def choosing(self) -> Choosing:
        on_offer = [(name, "m", self.draft) for name in self.names]
        return Choosing(self.request, lambda: on_offer, "", can_ahead=False)

    def known(self, drafter: str, *ranks: int) -> None:
        """Requests before this one had the drafter's tokens at these ranks, over and over."""
        before = RequestPlanner(self.planner, drafter, Acceptance.COUPLED, greedy=True)
        before.stats.take_shadow(Shadow(1, 0, ranks * 200, (0.8,) * 200 * len(ranks)))

    def other(self, room: int = ROOM, length: int = 100) -> str | None:
        """What it changes to when it next looks."""
        for rounds in range(1, round(SPEED_MEMORY)):
            self.request.rounds = rounds
            assert self.choosing.other("", length, room) is None
        self.request.rounds = round(SPEED_MEMORY)
        found = self.choosing.other("", length, room)
        return None if found is None else found.name

    def first(self) -> str:
        found = self.choosing.first()
        assert found is not None
        return found.name


@pytest.mark.parametrize(("default", "other", "chosen"), [(1, 2, ""), (2, 1, "eagle"), (1, 1, "")])
def test_the_one_whose_tokens_were_the_targets_is_chosen(default: int, other: int, chosen: str) -> None:
    case = Case()
    case.known(DEFAULT_NAME, default)
    case.known(OTHER, other)
    assert case.first() == chosen


@pytest.mark.parametrize(("default_ms", "other_ms", "chosen"), [(2, 8, ""), (8, 2, "eagle")])
def test_of_equally_good_ones_the_faster_is_chosen(default_ms: float, other_ms: float, chosen: str) -> None:
    case = Case(default_ms, other_ms)
    for drafter in (DEFAULT_NAME, OTHER):
        case.known(drafter, 1)
    assert case.first() == chosen


def test_a_dear_one_that_nobody_has_tried_is_tried_once() -> None:
    """At its prior (.7) it would look slower than a cheap one that is right two times in three."""
    case = Case(default_ms=2.0, other_ms=4.0)
    case.known(DEFAULT_NAME, 1, 1, 2)
    with mock.patch.object(TokenAcceptance, "upper_bound", lambda self, positions: self):
        assert case.first() == ""
    assert case.first() == "eagle"
    case.known(OTHER, 1, 1, 2)
    assert case.first() == ""


def test_what_this_request_sees_of_its_own_has_it_change() -> None:
    """Others found the default good; here it is useless."""
    case = Case()
    case.known(DEFAULT_NAME, 1)
    case.known(OTHER, 1)
    assert case.other() is None
    case.request.stats.take_shadow(Shadow(1, 0, (2,) * 64, (0.8,) * 64))
    assert case.other() == "eagle"


def test_catching_up_must_pay_in_what_is_left_to_write() -> None:
    case = Case()
    case.known(OTHER, 1)
    case.request.stats.take_shadow(Shadow(1, 0, (2,) * 64, (0.8,) * 64))
    assert case.other(room=ROOM) == "eagle"
    assert case.other(room=4, length=4000) is None


def test_a_drafter_that_was_left_is_remembered() -> None:
    case = Case()
    for drafter in (DEFAULT_NAME, OTHER):
        case.known(drafter, 1)
    case.request.stats.take_shadow(Shadow(1, 0, (2,) * 64, (0.8,) * 64))
    own = case.request.stats.own.tokens.reach(4)
    case.request.stats.change(OTHER)
    case.request.stats.take_shadow(Shadow(1, 64, (2,) * 64, (0.8,) * 64))
    case.request.stats.change(DEFAULT_NAME)
    assert case.request.stats.own.tokens.reach(4) == own


def test_a_lone_drafter_is_never_left_and_without_one_or_its_costs_there_is_no_choice() -> None:
    case = Case(offered=1)
    case.known(DEFAULT_NAME, 2)
    assert case.first() == ""
    assert case.other() is None
    assert Case(offered=0).choosing.first() is None
    case = Case()
    with mock.patch.object(SaidByTarget, "costs", TargetCosts()):
        assert case.choosing.other("", 10, ROOM) is None


def test_what_is_known_of_texts_is_shared_by_all_drafters() -> None:
    """A request that is drafted for by another than the default leaves what it learned of matches to the next one."""
    case = Case()
    case.request.stats.change(OTHER)
    match = Match(4, (7,))
    for _ in range(60):
        case.request.stats.take_match(match, (8,))
    for drafter in (DEFAULT_NAME, OTHER):
        following = RequestPlanner(case.planner, DEFAULT_NAME, Acceptance.COUPLED, greedy=True)
        following.stats.change(drafter)
        assert following.stats.own.texts.ngrams.prefix_chances(match, 1)[0] < 0.3
    untold = NgramShadow()
    assert untold.prefix_chances(match, 1)[0] > 0.4
