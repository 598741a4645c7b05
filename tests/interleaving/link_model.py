"""A request, a target and a draft service, the two links between them, and every step that may come next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.interleaving.modelled_coordinator import CoordinatorModel, ModelledRequest, Sent
from tests.interleaving.modelled_draft import AtDraft, DraftModel, SentProposal
from tests.interleaving.modelled_target import AtTarget, DrawnVerdict, Refused, TargetModel, Text, truth

PROMPT: Text = (0,)
ENDED = ("ended",)
"""Behind the last message of a link that broke."""
Messages = tuple[tuple[Any, ...], ...]


class Link(NamedTuple):
    """Messages on their way, and the service's sessions; `up` is None between a break and its news."""

    up: Messages | None = ()
    down: Messages = ()
    sessions: tuple[tuple[int, Any], ...] = ()


class State(NamedTuple):
    """All that there is. `faults` and `changes` are those that may still come."""

    request: ModelledRequest
    t: Link = Link()
    d: Link = Link()
    numbers: int = 0
    faults: int = 0
    changes: int = 0

    @property
    def is_final(self) -> bool:
        """Whether the text has ended and nothing is left."""
        return self.request.phase == "closed" and self.t == self.d == Link()


@dataclass(frozen=True)
class Bounds:
    """How large a configuration is searched.

    Attributes:
        tokens: of the text, the prompt's one among them.
        lease: most rounds that a round may lease.
        faults: links that break.
        changes: of the drafter.
        drafts: whether there is a draft service.
        at_once: whether the coordinator does at once what it can do; else anything may come before.
    """

    tokens: int = 4
    lease: int = 2
    faults: int = 1
    changes: int = 0
    drafts: bool = True
    at_once: bool = False


class LinkModel:
    """The whole; parts may be replaced by wrong ones."""

    def __init__(
        self,
        bounds: Bounds,
        coordinator: type[CoordinatorModel] = CoordinatorModel,
        target: type[TargetModel] = TargetModel,
        draft: type[DraftModel] = DraftModel,
    ) -> None:
        self.bounds = bounds
        self.coordinator = coordinator(bounds.tokens, bounds.lease)
        self.target = target(bounds.tokens)
        self.draft = draft(bounds.tokens)

    @property
    def first(self) -> State:
        """Before anything."""
        return State(ModelledRequest(PROMPT), faults=self.bounds.faults, changes=self.bounds.changes)

    def next(self, state: State) -> Iterator[tuple[str, State]]:
        """Every step that may come next: whose it is, and what is then."""
        own = [*self._coordinator_steps(state)]
        yield from own
        if own and self.bounds.at_once:
            return
        for name in "td":
            link: Link = getattr(state, name)
            if link.up:
                yield f"c>{name}", self._delivered(state, name, link, link.up[0])
            if link.down:
                yield f"{name}>c", self._heard(state, name, link, link.down[0])
            for number, session in link.sessions:
                stepped = self._stepped(name, number, session)
                if stepped is not None:
                    changed, event = stepped
                    yield name, _with(state, name, _kept(link, number, changed)._replace(down=(*link.down, event)))
            if state.faults and link.up is not None:
                for down in {(), link.down}:
                    broken = Link(None, (*down, ENDED), self.left_behind(link))
                    yield f"end {name}", _with(state, name, broken)._replace(faults=state.faults - 1)

    def check(self, state: State) -> None:
        """What holds in every state.

        Raises:
            AssertionError: it does not.
        """
        text, request = state.request.text, state.request
        for end in range(len(PROMPT), len(text)):
            assert text[end] == truth(text[:end]), f"text {text}: position {end} must be {truth(text[:end])}"
        most = self.bounds.lease + 1
        assert len(request.answers) <= most, f"{len(request.answers)} answers are kept: must be at most {most}"
        assert len(request.offers) <= 3, f"{len(request.offers)} proposals are kept: must be at most 3"
        for _, session in state.t.sessions:
            assert len(session.run) <= most, f"{len(session.run)} verdicts are kept: must be at most {most}"
        for _, session in state.d.sessions:
            known = len(session.text)
            assert session.text == text[:known], f"the draft's text {session.text}: must begin {text}"

    # Seams.

    def left_behind(self, link: Link) -> tuple[tuple[int, Any], ...]:
        """Sessions that a service keeps of a link that broke."""
        return ()

    # Steps.

    def _coordinator_steps(self, state: State) -> Iterator[tuple[str, State]]:
        request, model, number = state.request, self.coordinator, state.numbers + 1
        if request.phase == "plan":
            for plan in model.plans(request, self.bounds.drafts):
                yield (
                    f"plan {plan.source} {plan.lease} {plan.ahead:d}",
                    self._sent(state, *model.planned(request, plan, number)),
                )
            if state.changes and request.drafting and request.started is None:
                changed = request._replace(drafting=0, offers=(), cached=None)
                closing: list[Sent] = [("d", ("close", request.drafting))]
                yield "c", self._sent(state._replace(changes=state.changes - 1), changed, closing)
        elif request.phase == "draft" and (self.coordinator.is_answered(request) or not self.bounds.at_once):
            yield "c", state._replace(request=model.taken(request))
        elif request.phase == "send":
            yield "c", self._sent(state, *model.dispatched(request, number))
        elif request.phase == "tell":
            yield "c", self._sent(state, *model.announced(request, number))
        elif request.phase == "verdict":
            yield from self._verdict_steps(state)
        elif request.phase == "ended":
            yield "c", self._sent(state, ModelledRequest(request.text, "closed"), self.coordinator.closing(request))

    def _verdict_steps(self, state: State) -> Iterator[tuple[str, State]]:
        request = state.request
        assert request.asked is not None, "it is waited for"
        known = dict(request.answers)
        if request.asked.base not in known:
            yield "c", state._replace(request=request._replace(phase="send"))
        elif known[request.asked.base] is not None:
            yield "c", state._replace(request=self.coordinator.decided(request))
        prefetched = self.coordinator.prefetch(request)
        if prefetched is not None:
            yield "c", self._sent(state, *prefetched)

    def _sent(self, state: State, request: ModelledRequest, messages: list[Sent]) -> State:
        for name, message in messages:
            link: Link = getattr(state, name)
            if link.up is not None:
                state = _with(state, name, link._replace(up=(*link.up, message)))
        opened = max(request.session, request.drafting, state.numbers)
        return state._replace(request=request, numbers=opened)

    def _delivered(self, state: State, name: str, link: Link, message: tuple[Any, ...]) -> State:
        assert link.up is not None, "it has messages"
        link = link._replace(up=link.up[1:])
        kind, number, *rest = message
        sessions = dict(link.sessions)
        if kind == "open":
            session: Any = AtTarget(rest[0]) if name == "t" else AtDraft(rest[0], wants=rest[1])
            return _with(state, name, _kept(link, number, session))
        if kind == "close":
            sessions.pop(number, None)
            return _with(state, name, link._replace(sessions=tuple(sessions.items())))
        if number not in sessions:
            raise Refused(f"{kind}: session {number} is not open")
        held: Any = sessions[number]
        events = tuple[Any, ...]()
        if kind == "round":
            held, events = self.target.take_round(held, rest[0])
        elif kind == "prefetch":
            held = self.target.take_prefetched(held, *rest)
        elif kind == "commit":
            held = self.draft.take_commit(held, rest[0])
        else:
            held = self.draft.take_announced(held, rest[0])
        link = _kept(link, number, held)
        return _with(state, name, link._replace(down=(*link.down, *((number, event) for event in events))))

    def _stepped(self, name: str, number: int, session: Any) -> tuple[Any, tuple[Any, ...]] | None:
        if name == "t" and session.pending is not None:
            verified, drawn = self.target.step(session)
            return verified, (number, drawn)
        if name == "d" and self.draft.is_busy(session):
            drafted, offered = self.draft.step(session)
            return drafted, (number, offered)
        return None

    def _heard(self, state: State, name: str, link: Link, event: tuple[Any, ...]) -> State:
        request = state.request
        if event == ENDED:
            lost = self.coordinator.target_lost if name == "t" else self.coordinator.draft_lost
            return _with(state, name, Link(sessions=link.sessions))._replace(request=lost(request))
        number, said = event
        if isinstance(said, DrawnVerdict) and number == request.session:
            request = self.coordinator.verdict(request, said)
        elif isinstance(said, SentProposal) and number == request.drafting:
            request = self.coordinator.offered(request, said)
        return _with(state, name, link._replace(down=link.down[1:]))._replace(request=request)


def _with(state: State, name: str, link: Link) -> State:
    return state._replace(t=link) if name == "t" else state._replace(d=link)


def _kept(link: Link, number: int, session: Any) -> Link:
    return link._replace(sessions=tuple({**dict(link.sessions), number: session}.items()))
