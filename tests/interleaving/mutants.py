"""Wrong variants of the product, one seam each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from coordinator.drafting.drafting import Drafting
from coordinator.sessions.target import TargetSession
from draft_service.scheduler import FeatureWaits
from paceline.drafting.session import DraftSession
from paceline.drafting.speculation_cache import SpeculationCache
from paceline.protocol.errors import PacelineError
from paceline.protocol.target import Round, Verdict
from paceline.rpc.frames import FrameWriter
from paceline.rpc.sessions import LinkSessions
from target_service.session import Session


@dataclass(frozen=True)
class ProductMutant:
    """A wrong variant of the product.

    Attributes:
        setup: on which it is looked for.
        shows: what the failure says, a regular expression.
        owner, attribute: the class, and its method that another one takes the place of.
    """

    name: str
    setup: str
    shows: str
    owner: type
    attribute: str
    other: Callable[..., Any]

    def patch(self) -> AbstractContextManager[Any]:
        """The product with it."""
        return mock.patch.object(self.owner, self.attribute, self.other)


def _any_outcome(self: Session, round_: Round, verdict: Verdict, info: Any) -> Round | None:
    return next(iter(self.prefetched_rounds.values()), None)


def _keeps_waiting(self: TargetSession, error: PacelineError) -> None:
    self._id = None


def _drops_unread(original: Any) -> Any:
    """A verdict that names the next round throws away those before it, whether or not they were read."""

    def on_verdict(self: TargetSession, verdict: Verdict, answer: Any) -> None:
        original(self, verdict, answer)
        if verdict.self_started is not None:
            self._answers = {base: each for base, each in self._answers.items() if base >= verdict.base_length}

    return on_verdict


def _forgets_to_tell(self: DraftSession) -> None:
    self._id = None


def _keeps_all(self: SpeculationCache[Any], outcome: Any) -> None:
    self._expected_outcome, self._base_length = outcome, -1


def _everything_is_urgent(original: Any) -> Any:
    def send(self: FrameWriter[Any], message: Any, urgent: bool = False) -> None:
        self._waiting_sessions.clear()
        original(self, message, urgent)

    return send


def _commits_late(self: Drafting, round_: Round) -> None:
    if self._plan.ahead.fan_out:
        self._session.verifying(round_, replace(self._plan.ahead, max_nodes=0))
    self._send_pending()


def _sees_the_last(self: Session, round_: Round) -> tuple[int, ...]:
    """Penalties count what a round brings, and not what it accepted before."""
    return self.facts.token_ids if self.last is None else round_.committed


def _changes_lost_rounds(original: Any) -> Any:
    """A round of a lost session is sent again without what it proposed."""

    def dispatch(self: TargetSession, committed: Any, node: int, proposal: Any, *rest: Any, **named: Any) -> Round:
        again = self._committed_at == len(committed) if hasattr(self, "_committed_at") else False
        self._committed_at = len(committed)  # type: ignore[attr-defined]
        sent: Round = original(self, committed, node, None if again else proposal, *rest, **named)
        return sent

    return dispatch


Mutant = ProductMutant
NOT_AT_WORK = "not at work on the session"
MUTANTS = (
    Mutant(
        "a lost round is sent again without its proposal", "block", "another proposal",
        TargetSession, "_dispatch", _changes_lost_rounds(TargetSession._dispatch),
    ),
    Mutant(
        "penalties don't see accepted tokens", "fixed lengths", "^text", Session, "newly_committed", _sees_the_last
    ),
    Mutant(
        "urgent messages overtake their own session's", "drafters change", "not open",
        FrameWriter, "send", _everything_is_urgent(FrameWriter.send),
    ),
    Mutant(
        "a round is announced before the commit below it", "one of each", "PREFIX_MISMATCH",
        Drafting, "verifying", _commits_late,
    ),
    Mutant(
        "every proposal is kept", "fixed lengths", "DraftSession keeps", SpeculationCache, "expect", _keeps_all
    ),
    Mutant(
        "a wait for features outlives its session", "features", "keeps|session failed",
        FeatureWaits, "drop", lambda *_, **__: None,
    ),
    Mutant(
        "a round starts with what was prefetched for another outcome", "matches", "refused|started|text",
        Session, "_named_next", _any_outcome,
    ),
    Mutant("a lease that is renewed ends", "matches", NOT_AT_WORK, Session, "_extend", lambda *_: None),
    Mutant(
        "verdicts are forgotten before they are read", "pools", NOT_AT_WORK,
        TargetSession, "_on_verdict", _drops_unread(TargetSession._on_verdict),
    ),
    Mutant(
        "a lost target's verdicts are waited for", "features", NOT_AT_WORK, TargetSession, "on_lost", _keeps_waiting
    ),
    Mutant(
        "a lost draft's session goes on", "fixed lengths", "not open",
        DraftSession, "on_lost", lambda self, error: None,
    ),
    Mutant(
        "a lost draft's proposal is told by its number", "no room to verify", "proposal_id = ",
        DraftSession, "_began_behind", lambda self, round_: False,
    ),
    Mutant("a draft session ends in silence", "one of each", "d0 holds", DraftSession, "close", _forgets_to_tell),
    Mutant(
        "a service keeps the sessions of a link that broke", "one of each", "0 holds",
        LinkSessions, "on_closed", lambda self: None,
    ),
)  # fmt: skip
