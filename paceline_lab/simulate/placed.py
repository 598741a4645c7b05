"""Where a simulated session is: its coordinator, target and draft, the ways between them, and how it finds others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.protocol.proposal import MAX_PROPOSAL_NODES
from paceline_lab.simulate.rounds import RequestTotals
from paceline_lab.simulate.trace import TracedRequest
from target_service.prompt_rows import NO_ROWS

if TYPE_CHECKING:
    from paceline_lab.simulate.coordinator import CoordinatorProcess
    from paceline_lab.simulate.draft import DraftedSession, SimulatedDraft
    from paceline_lab.simulate.policies import SessionPolicy
    from paceline_lab.simulate.services import SimulatedServices
    from paceline_lab.simulate.target import SimulatedTarget
    from paceline_lab.simulate.ways import Route

RETRY_MS = 100.0
"""How long a session without a target waits before it looks for one again, and a client before it asks again."""


class PlacedSession:
    """A request's sessions on its peers. After a loss it opens others with all that its coordinator has committed.

    Attributes:
        lives: counts the sessions that it has had on targets: what was sent in an earlier one is lost.
    """

    __slots__ = (
        "_agenda", "_draft", "_draft_lag", "_draft_opened", "_draft_route", "_held", "_home", "_is_at_target",
        "_is_placed", "_policy", "_request", "_target", "_target_route", "_world", "at_target", "done", "key",
        "kv_rows", "lives", "prefill_left", "prefilled_rows", "prefix_key", "prefix_rows", "priority", "prompt_rows",
        "prompt_tokens", "tokens", "totals",
    )  # fmt: skip

    reported_rows = NO_ROWS
    _policy: SessionPolicy
    _target: SimulatedTarget
    _target_route: Route

    def __init__(self, key: int, request: TracedRequest, home: CoordinatorProcess, world: SimulatedServices) -> None:
        self.key = key
        self.tokens = request.tokens
        self.prompt_tokens = self.prompt_rows = request.prompt_tokens
        self.prefill_left, self.prefilled_rows = request.prompt_tokens - 1, 0
        self.kv_rows = request.prompt_tokens + request.tokens + MAX_PROPOSAL_NODES
        self.prefix_key, self.prefix_rows = request.prefix_key, request.prefix_tokens
        self.priority = request.priority
        self.done = self.at_target = self.lives = 0
        self.totals = RequestTotals(request.arrival_ms, group=request.group)
        self._request = request
        self._home = home
        self._world = world
        self._agenda = world.agenda
        self._draft: SimulatedDraft | None = None
        self._draft_route: Route | None = None
        self._held: DraftedSession | None = None
        self._draft_lag, self._draft_opened = 0, 0.0
        """Tokens that the draft may still be computing: it has said nothing since it opened the session then."""
        self._is_at_target = self._is_placed = False
        """Whether a session is open there, and whether the planner knows where the request is."""

    @property
    def prefix(self) -> Sequence[int]:
        """The tokens of its prompt that others may share, made up."""
        first = self.prefix_key << 20
        return range(first, first + self.prefix_rows) if self.prefix_key else ()

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self._request.tenant

    def target_lost(self) -> None:
        """The target has failed; the coordinator hears of it in a while."""
        self._lose_target(self._world.notice_ms)

    def draft_lost(self) -> None:
        """The draft service has failed."""
        self._draft = self._held = None
        self._agenda.at(self._agenda.now + self._world.notice_ms, self._without_draft, self.lives)

    def home_lost(self) -> None:
        """The coordinator has failed: the client goes on at another one, with the tokens that it has."""
        if self._is_at_target:
            self._target.leave(self)  # type: ignore[arg-type]  # a SimulatedSession, which has the rest
        if self._draft is not None and self._held is not None:
            self._draft.close(self._held)
        self._draft = self._held = None
        self._policy.close()
        self._lose_target(self._world.notice_ms)

    def _lose_target(self, notice_ms: float) -> None:
        self.lives += 1
        self._is_at_target = False
        self.totals.reopened += 1
        self._agenda.at(self._agenda.now + notice_ms, self._find_target, self.lives)

    def _find_target(self, life: int) -> None:
        """Open the session anew: all rows of what is committed are to be computed."""
        if life != self.lives:
            return
        if not self._home.is_up and not self._move_home():
            self._agenda.at(self._agenda.now + RETRY_MS, self._find_target, life)
            return
        if not self._place_target():
            self._agenda.at(self._agenda.now + RETRY_MS, self._find_target, life)
            return
        self.at_target, self.prefilled_rows = self.done, 0
        self.prefill_left = self.prompt_tokens + self.done - 1
        self._place_draft()
        self._begin_anew()

    def _move_home(self) -> bool:
        home = self._world.another_home()
        if home is None:
            return False
        self._home = home
        home.sessions[self.key] = self
        self._policy = self._world.session_policy(home)
        return True

    def _place_target(self) -> bool:
        target = self._home.place_target(self)
        if target is None:
            return False
        self._target, self._target_route = target, self._home.route_to_target(target)
        return True

    def _place_draft(self) -> None:
        """Open a session on a draft service, if there is none and one is up."""
        if self._held is not None:
            return
        draft = self._home.place_draft(self)
        if draft is not None:
            self._draft, self._draft_route = draft, self._home.route_to_draft(draft)
            computes = self._policy.expects_drafts
            self._held = draft.open(self, computes=computes)  # type: ignore[arg-type]  # a SimulatedSession
            self._draft_lag, self._draft_opened = computes * (self.prompt_tokens + self.done), self._agenda.now
            self._is_placed = False

    def _refuse(self) -> None:
        """No place for the request."""
        self.totals.refused = True
        self.totals.end_ms = self._agenda.now
        self._world.ended(self.totals)

    def _turned_away(self) -> None:
        """The target has no place: a new request is refused, one that has begun looks for another target."""
        if self.totals.rounds or not self._target.is_up:
            self._lose_target(RETRY_MS)
            return
        if self._draft is not None and self._held is not None:
            self._draft.close(self._held)
            self._held = None
        self._policy.close()
        self._home.sessions.pop(self.key, None)
        self._refuse()

    def _begin_anew(self) -> None:
        """The session is at another target: plan its next round."""
        raise NotImplementedError

    def _without_draft(self, life: int) -> None:
        """The draft service is known to be gone: who waits for it goes on."""
        raise NotImplementedError
