"""The coordinator's side of the model: one request's rounds, what it leaves with the target, what it tells the draft.

What a policy decides is open: every plan that is possible is a step of its own.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.interleaving.modelled_draft import Announced, SentProposal, Told
from tests.interleaving.modelled_target import ROOT, Asked, DrawnVerdict, End, Refused, Text, end_of

PENDING = 2
"""Committed tokens that are kept from the draft service during a lease."""
Sent = tuple[str, tuple[object, ...]]
"""A message: to `t` or `d`, its kind and the rest."""


class Planned(NamedTuple):
    """The next round: where its proposal comes from, how many may follow it, whether its outcomes are drafted for."""

    source: str
    lease: int = 0
    ahead: bool = False


class ModelledRequest(NamedTuple):
    """All that the coordinator holds of a request.

    `phase`: it plans, waits for a draft, sends its round, announces it, waits for the verdict, or has ended.
    `answers` are the verdicts to come, and those that came and were not asked for. `offers` is the speculation
    cache, and `cached` what it had for the outcome that came true.
    """

    text: Text
    phase: str = "plan"
    plan: Planned = Planned("none")
    proposal: Text = ()
    number: int = 0
    node: int = ROOT
    session: int = 0
    answers: tuple[tuple[int, DrawnVerdict | None], ...] = ()
    asked: Asked | None = None
    prefetched: tuple[tuple[End, Text], ...] = ()
    leased: int = 0
    started: Text | None = None
    drafting: int = 0
    opened_at: int = 0
    fresh: bool = True
    offers: tuple[SentProposal, ...] = ()
    awaited: End | None = None
    wanted: bool = False
    cached: SentProposal | None = None
    pending: tuple[End, Text] | None = None
    drafted_for: bool = False


class CoordinatorModel:
    """What a coordinator does: each method returns the request behind a step, and the messages that it sends."""

    def __init__(self, length: int, lease: int) -> None:
        self.length = length
        self.lease = lease

    def plans(self, request: ModelledRequest, can_draft: bool) -> list[Planned]:
        """Every plan that is possible."""
        room = self.length - len(request.text) - 1
        ahead = (False, True) if can_draft and room else (False,)
        if request.leased > 1:
            return [Planned("none")]
        if request.started is not None:
            return [Planned("started", ahead=each) for each in ahead]
        found = [Planned("none", lease) for lease in range(min(room, self.lease) + 1)]
        found += [Planned("none", ahead=True)] if ahead[-1] else []
        if request.leased or not room:
            return found
        sources = self.sources(request, can_draft)
        return found + [Planned(source, ahead=each) for source in sources for each in ahead]

    def planned(self, request: ModelledRequest, plan: Planned, session: int) -> tuple[ModelledRequest, list[Sent]]:
        """A plan is made; `session` is a number for a draft's session, if it needs one."""
        request = request._replace(plan=plan, phase="send", proposal=(), number=0)
        sent: list[Sent] = []
        needed = plan.source == "wait" or plan.ahead
        if needed and request.pending is None and request.awaited is not None:
            request = request._replace(pending=(request.awaited, ()))
        if plan.ahead and request.awaited is None and not request.drafting:
            request, sent = self.told(request, session, wants=plan.source == "wait")
        if plan.source == "started":
            request = request._replace(proposal=request.started or ())
        elif plan.source == "cached" and request.cached is not None:
            request = request._replace(proposal=request.cached.proposal, number=request.cached.number)
        elif plan.source == "wait" and not sent:
            request, sent = self.told(request, session, wants=True)
        if plan.source == "wait":
            request = request._replace(phase="draft")
        if plan.source == "started" and request.cached is not None:
            request = request._replace(number=request.cached.number)
        return request, sent

    def told(self, request: ModelledRequest, session: int, *, wants: bool) -> tuple[ModelledRequest, list[Sent]]:
        """The draft service hears of what was committed; one that has no session gets the text."""
        if not request.drafting:
            request = request._replace(
                drafting=session, opened_at=len(request.text) - 1, fresh=True, pending=None, offers=(), awaited=None
            )
            return request._replace(wanted=wants), [("d", ("open", session, request.text, wants))]
        if request.pending is None:
            return request, []
        end, tokens = request.pending
        told = Told(end, tokens, len(request.text) - len(tokens), wants)
        return request._replace(pending=None, wanted=wants), [("d", ("commit", request.drafting, told))]

    def is_answered(self, request: ModelledRequest) -> bool:
        """Whether the wait for a draft is over; it may also be given up."""
        return not request.drafting or any(each.end == request.awaited for each in request.offers)

    def taken(self, request: ModelledRequest) -> ModelledRequest:
        """The round goes with what was drafted, or without."""
        found = next((each for each in request.offers if each.end == request.awaited), None)
        request = request._replace(phase="send", wanted=False)
        if found is None:
            return request
        offers = tuple(each for each in request.offers if each != found)
        return request._replace(offers=offers, proposal=found.proposal, number=found.number, fresh=False)

    def dispatched(self, request: ModelledRequest, session: int) -> tuple[ModelledRequest, list[Sent]]:
        """The round leaves, unless the target has started it; `session` is a number for a target session anew."""
        base = len(request.text) - 1
        known = dict(request.answers)
        self_started, following = base in known, len(known) - 1
        fresh = not request.session and not self_started
        lease = request.plan.lease if not request.proposal else 0
        asked = Asked(base, ROOT if fresh else request.node, request.text[-1], request.proposal, lease)
        sent: list[Sent] = []
        if fresh:
            request = request._replace(session=session)
            sent.append(("t", ("open", session, request.text)))
        extends = request.session and following <= lease // 2 < lease
        if not self_started or extends:
            known = {**dict.fromkeys(range(base, base + lease + 1)), **known}
            sent.append(("t", ("round", request.session, asked)))
        answers = tuple(sorted(known.items()))
        return request._replace(phase="tell", asked=asked, answers=answers, prefetched=()), sent

    def announced(self, request: ModelledRequest, session: int) -> tuple[ModelledRequest, list[Sent]]:
        """The round has left: the draft service hears of the last commits, and of this round."""
        asked, plan, sent = request.asked, request.plan, list[Sent]()
        assert asked is not None, "it was dispatched"
        in_lease = request.leased > 1 or plan.lease > 0
        held_back = in_lease and not request.drafted_for and len((request.pending or (0, ()))[1]) < PENDING
        if request.pending is not None and not held_back:
            request, sent = self.told(request, session, wants=False)
        if plan.ahead and request.drafting:
            by_tokens = asked.proposal and self.began_behind(request, asked)
            number = 0 if by_tokens else request.number if asked.proposal else 0
            told = Announced(
                asked.base, number, len(asked.proposal) if number else 0, asked.proposal * (not number), True
            )
            sent.append(("d", ("announced", request.drafting, told)))
        return request._replace(phase="verdict"), sent

    def prefetch(self, request: ModelledRequest) -> tuple[ModelledRequest, list[Sent]] | None:
        """What was drafted for an outcome of the round in flight is left with the target."""
        asked = request.asked
        if request.phase != "verdict" or asked is None or not request.session:
            return None
        there = {each.end: each.proposal for each in request.offers if each.end and each.end.base == asked.base}
        new = tuple(sorted(item for item in there.items() if item not in request.prefetched))
        if not new or dict(request.answers).get(asked.base, 0) is not None:
            return None
        request = request._replace(prefetched=tuple(sorted({**dict(request.prefetched), **dict(new)}.items())))
        return request, [("t", ("prefetch", request.session, asked.base, new))]

    def verdict(self, request: ModelledRequest, drawn: DrawnVerdict) -> ModelledRequest:
        """A verdict comes."""
        known = dict(request.answers)
        if drawn.base not in known:
            return request
        if drawn.started >= 0:
            known = {drawn.base: None, drawn.started: None}
        known[drawn.base] = drawn
        return request._replace(answers=tuple(sorted(known.items())))

    def offered(self, request: ModelledRequest, offer: SentProposal) -> ModelledRequest:
        """A proposal comes; one that answers an earlier outcome is stale."""
        behind = request.awaited.base if request.awaited else -1
        stale = offer.end != request.awaited and (offer.end is None or offer.end.base <= behind)
        if stale:
            return request
        kept = tuple(each for each in request.offers if each.end != offer.end)
        return request._replace(offers=(*kept, offer))

    def decided(self, request: ModelledRequest) -> ModelledRequest:
        """The verdict of the round in flight decides it; the next round is to be planned."""
        asked, known = request.asked, dict(request.answers)
        assert asked is not None, "it waits"
        drawn = known.pop(asked.base)
        assert drawn is not None, "it has come"
        end = end_of(asked, drawn.tokens)
        tokens = (*asked.proposal[: end.node + 1], end.token)[: self.length - len(request.text)]
        started = None
        if drawn.started >= 0:
            started = dict(request.prefetched).get(end)
            if started is None:
                raise Refused(f"round {drawn.started} was started, nothing was prefetched for {end}")
        request = request._replace(
            text=(*request.text, *tokens),
            node=end.node,
            answers=tuple(known.items()),
            leased=len(known),
            started=started,
        )
        return self.settled(request, end, tokens)

    def settled(self, request: ModelledRequest, end: End, tokens: Text) -> ModelledRequest:
        """The draft's proposal for the outcome is kept, and what it will be told."""
        cached = next((each for each in request.offers if each.end == end), None)
        before = request.pending[1] if request.pending else ()
        pending = (end, (*before, *tokens)) if request.drafting or request.pending else None
        over = len(request.text) >= self.length
        return request._replace(
            phase="ended" if over else "plan", asked=None, awaited=end, offers=(), cached=cached, pending=pending,
            wanted=False, drafted_for=request.plan.ahead,
        )  # fmt: skip

    def target_lost(self, request: ModelledRequest) -> ModelledRequest:
        """The target's link broke: verdicts that have come are kept."""
        kept = tuple((base, drawn) for base, drawn in request.answers if drawn is not None)
        return request._replace(session=0, answers=kept)

    # Seams.

    def closing(self, request: ModelledRequest) -> list[Sent]:
        """The text has ended: the services hear of it."""
        sent: list[Sent] = [("t", ("close", request.session))] if request.session else []
        return [*sent, ("d", ("close", request.drafting))] if request.drafting else sent

    def sources(self, request: ModelledRequest, can_draft: bool) -> list[str]:
        """Where a proposal may come from: what is there is not waited for, since nobody drafts it again."""
        return ["cached"] if request.cached else ["wait"] if can_draft else []

    def began_behind(self, request: ModelledRequest, asked: Asked) -> bool:
        """Whether a round's proposal is older than the draft's session."""
        return request.fresh and asked.base == request.opened_at

    def draft_lost(self, request: ModelledRequest) -> ModelledRequest:
        """The draft service's link broke."""
        return request._replace(drafting=0)
