"""Wrong variants of the product, one seam each; of those that the model knows, the same mistake in the model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

from coordinator.drafting.drafting import Drafting
from coordinator.sessions.target import TargetSession
from draft_service.scheduler import FeatureWaits
from paceline.drafting.session import DraftSession
from paceline.drafting.speculation_cache import SpeculationCache
from paceline.protocol.draft import DraftBudget
from paceline.protocol.errors import PacelineError
from paceline.protocol.target import Round, Verdict
from paceline.rpc.frames import FrameWriter
from paceline.rpc.sessions import LinkSessions
from target_service.session import Session
from tests.interleaving.link_model import Bounds, Link, LinkModel
from tests.interleaving.modelled_coordinator import CoordinatorModel, ModelledRequest, Sent
from tests.interleaving.modelled_draft import SureDraft
from tests.interleaving.modelled_target import Asked, AtTarget, End, TargetModel, Text

Patch = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class ProductMutant:
    """A wrong variant of the product.

    Attributes:
        setup: on which it is looked for.
        shows: what the failure says, a regular expression.
    """

    name: str
    setup: str
    shows: str
    patch: Patch


@dataclass(frozen=True)
class PairedMutant:
    """One mistake in the model and in the product: a way on which the model shows it takes the product there, too.

    Attributes:
        model: with the mistake.
        model_shows, product_shows: what the failures say, regular expressions.
    """

    name: str
    bounds: Bounds
    model_shows: str
    product_shows: str
    patch: Patch
    model: Callable[[Bounds], LinkModel] = field(repr=False)


def _replaced(owner: type, name: str, change: Any) -> Patch:
    return partial(mock.patch.object, owner, name, change)


# Both.


class AnyOutcomeStarts(TargetModel):
    """Starts the next round with whatever was prefetched."""

    def prefetched_for(self, held: AtTarget, end: End) -> Asked | None:
        if not held.prefetched:
            return None
        proposal, base = held.prefetched[0][1], end.base + end.node + 2
        return Asked(base, end.node, end.token, proposal) if base + 2 < self.length else None


class LeasesEnd(TargetModel):
    """Renews no lease."""

    def extended(self, held: AtTarget, asked: Asked, seen: int) -> AtTarget:
        return held._replace(run=held.run[seen:])


class WaitsForLostTarget(CoordinatorModel):
    """Waits on for the verdicts of a target that is lost."""

    def target_lost(self, request: ModelledRequest) -> ModelledRequest:
        return request._replace(session=0)


class KeepsLostDraft(CoordinatorModel):
    """Goes on with a session that ended with its link."""

    def draft_lost(self, request: ModelledRequest) -> ModelledRequest:
        return request


class TellsLostNumber(CoordinatorModel):
    """Names a lost draft's proposal by its number."""

    def began_behind(self, request: ModelledRequest, asked: Asked) -> bool:
        return False


class KeepsOffers(CoordinatorModel):
    """Keeps every proposal."""

    def settled(self, request: ModelledRequest, end: End, tokens: Text) -> ModelledRequest:
        return super().settled(request, end, tokens)._replace(offers=request.offers)


class LeavesDraftOpen(CoordinatorModel):
    """Ends a draft session without telling."""

    def closing(self, request: ModelledRequest) -> list[Sent]:
        return [("t", ("close", request.session))] if request.session else []


class KeepsSessions(LinkModel):
    """Services keep the sessions of links that broke."""

    def left_behind(self, link: Link) -> tuple[tuple[int, Any], ...]:
        return link.sessions


class DraftsAgain(CoordinatorModel):
    """Waits for a proposal that it has."""

    def sources(self, request: ModelledRequest, can_draft: bool) -> list[str]:
        return ["wait"] if can_draft else []


class WaitsAgain(CoordinatorModel):
    """Never goes without a draft that it waits for."""

    def taken(self, request: ModelledRequest) -> ModelledRequest:
        return super().taken(request) if self.is_answered(request) else request


class CommitsAll(CoordinatorModel):
    """Takes every proposed token for the target's own."""

    def decided(self, request: ModelledRequest) -> ModelledRequest:
        decided = super().decided(request)
        proposed = request.proposal
        if not proposed or decided.phase == "ended":
            return decided
        return decided._replace(text=(*request.text, *proposed, decided.text[-1])[: self.length])


def _any_outcome(self: Session, round_: Round, verdict: Verdict, info: Any) -> Round | None:
    return next(iter(self.prefetched_rounds.values()), None)


def _keeps_waiting(self: TargetSession, error: PacelineError) -> None:
    self._id = None


def _forgets_to_tell(self: DraftSession) -> None:
    self._id = None


def _keeps_all(self: SpeculationCache[Any], outcome: Any) -> None:
    self._expected_outcome, self._base_length = outcome, -1


def _made(**parts: Any) -> Callable[[Bounds], LinkModel]:
    return partial(LinkModel, **{"draft": SureDraft, **parts})


_SMALL = Bounds(4, 1, 1, at_once=True)
_ALONE = Bounds(3, 1, 1, drafts=False, at_once=True)
_LONG = Bounds(6, 3, 0, drafts=False, at_once=True)
_AHEAD = Bounds(5, 1, 0, at_once=True)
_STUCK, _LEFT = "nothing can happen any more", "this is left"
PAIRED = (
    PairedMutant(
        "a round starts with what was prefetched for another outcome", _AHEAD,
        "Refused|text", "refused|started|text", _replaced(Session, "_find_prefetched", _any_outcome),
        _made(target=AnyOutcomeStarts),
    ),
    PairedMutant(
        "a lease that is renewed ends", _LONG, _STUCK, "not at work on the session",
        _replaced(Session, "_extend", lambda *_: None), _made(target=LeasesEnd),
    ),
    PairedMutant(
        "a lost target's verdicts are waited for", _ALONE, _STUCK, "not at work on the session",
        _replaced(TargetSession, "on_lost", _keeps_waiting), _made(coordinator=WaitsForLostTarget),
    ),
    PairedMutant(
        "a lost draft's session goes on", _SMALL, "Refused|nothing can happen", "not open",
        _replaced(DraftSession, "on_lost", lambda self, error: None), _made(coordinator=KeepsLostDraft),
    ),
    PairedMutant(
        "a lost draft's proposal is told by its number", _SMALL, "Refused proposal 1: at most 0", "proposal_id = 1",
        _replaced(DraftSession, "_began_behind", lambda self, round_: False), _made(coordinator=TellsLostNumber),
    ),
    PairedMutant(
        "a draft session ends in silence", _SMALL, _LEFT, "d0 holds",
        _replaced(DraftSession, "close", _forgets_to_tell), _made(coordinator=LeavesDraftOpen),
    ),
    PairedMutant(
        "a service keeps the sessions of a link that broke", _ALONE, _LEFT, "0 holds",
        _replaced(LinkSessions, "on_closed", lambda self: None), partial(KeepsSessions, draft=SureDraft),
    ),
)  # fmt: skip


# The model alone.


@dataclass(frozen=True)
class ModelMutant:
    """A mistake in the model; `shows` is what the failure says, a regular expression."""

    name: str
    bounds: Bounds
    shows: str
    model: Callable[[Bounds], LinkModel] = field(repr=False)


MODELLED = (
    ModelMutant(
        "a proposal is committed whole",
        Bounds(5, 1, 0, at_once=True),
        "text",
        partial(LinkModel, coordinator=CommitsAll),
    ),
    ModelMutant(
        "every proposal is kept", Bounds(6, 1, 0, at_once=True), "proposals are kept", _made(coordinator=KeepsOffers)
    ),
    ModelMutant("what is there is waited for", _SMALL, _STUCK, _made(coordinator=DraftsAgain)),
    ModelMutant("a late draft is waited for again", Bounds(3, 1, 0), "for ever", _made(coordinator=WaitsAgain)),
)


# The product alone.


def _everything_is_urgent(original: Any) -> Any:
    def send(self: FrameWriter[Any], message: Any, urgent: bool = False) -> None:
        self._waiting_sessions.clear()
        original(self, message, urgent)

    return send


def _commits_late(self: Drafting, round_: Round) -> None:
    if self._plan.fan_out:
        self._session.verifying(round_, DraftBudget(self._plan.branch_depth, (), 0, self._plan.fan_out))
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


PRODUCT = (
    ProductMutant(
        "a lost round is sent again without its proposal",
        "block",
        "another proposal",
        _replaced(TargetSession, "_dispatch", _changes_lost_rounds(TargetSession._dispatch)),
    ),
    ProductMutant(
        "penalties don't see accepted tokens",
        "fixed lengths",
        "^text",
        _replaced(Session, "newly_committed", _sees_the_last),
    ),
    ProductMutant(
        "urgent messages overtake their own session's",
        "drafters change",
        "not open",
        _replaced(FrameWriter, "send", _everything_is_urgent(FrameWriter.send)),
    ),
    ProductMutant(
        "a round is announced before the commit below it",
        "one of each",
        "PREFIX_MISMATCH",
        _replaced(Drafting, "verifying", _commits_late),
    ),
    ProductMutant(
        "every proposal is kept",
        "fixed lengths",
        "DraftSession keeps",
        _replaced(SpeculationCache, "expect", _keeps_all),
    ),
    ProductMutant(
        "a wait for features outlives its session",
        "features",
        "keeps|session failed",
        _replaced(FeatureWaits, "drop", lambda *_, **__: None),
    ),
)
