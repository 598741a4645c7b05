"""Any policy at all: what the planner of a request would choose is taken from the schedule instead.

It may choose whatever `Options` leave open, so nothing here depends on what steps cost or on what was learned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

from coordinator.drafting.outcomes import OutcomeProposals
from coordinator.policy.choosing import Choosing, OfferedDrafter
from coordinator.policy.plan import Options, Plan, Source
from coordinator.policy.planner import RequestPlanner
from paceline.costs.goodput import Mode
from paceline.protocol.draft import DraftBudget

Pick = Callable[[int], int]
"""One of so many choices."""
DEEPEST = 3


def any_plan(options: Options, pick: Pick) -> Plan:
    """A plan that a planner might make."""
    if options.room <= 0:
        return Plan()
    if options.leased_rounds > 1:
        return Plan(shadow=options.drafts and pick(2) == 1)
    drafts_ahead = pick(3) if options.drafts else 0
    fan_out, is_mixed = options.fan_out if drafts_ahead else 0, drafts_ahead == 2 and options.can_prefetch
    depth = min(options.room, 1 + pick(DEEPEST))
    nodes = depth + (pick(2) if options.trees else 0)
    lease, budget = options.lease if is_mixed else 0, DraftBudget(depth, max_nodes=nodes, fan_out=fan_out)
    ahead = Plan(ahead=budget, lease=lease) if fan_out else Plan()
    if options.self_started:
        return ahead
    source = Source.NONE if options.leased_rounds else _any_source(options, pick)
    if source is Source.NONE:
        return ahead if fan_out else _resting(options, pick)
    patience_ms = (float("inf"), 1.0)[pick(4) == 1]
    return replace(ahead, source=source, nodes=nodes, depth=depth, patience_ms=patience_ms)


def _any_source(options: Options, pick: Pick) -> Source:
    sources = (
        [Source.WAIT] if options.drafts and options.cached_proposal is None else []
    )  # nobody drafts again what is there
    sources += [Source.CACHED] if options.cached_proposal is not None else []
    sources += [Source.NGRAM] if options.match is not None else []
    return [*reversed(sources), Source.NONE][pick(1 + len(sources))]


def _resting(options: Options, pick: Pick) -> Plan:
    kind = pick(4)
    lease = min(options.lease, (options.lease, 0, 1, options.lease)[kind])
    return Plan(lease=lease, shadow=options.drafts and pick(2) == 1, mode=Mode.REST if kind == 3 else None)


@contextmanager
def any_policy(pick: Pick) -> Iterator[None]:
    """Have every request planned as the schedule picks."""

    def other(self: Choosing, current: str, length: int, room: int) -> OfferedDrafter | None:
        offered = [offer for offer in self._offers() if offer.name != current]
        return offered[0] if offered and pick(4) == 3 else None

    def plan(self: RequestPlanner, options: Options) -> Plan:
        if self.target is not None:
            self.target.requests[self] = None
        return any_plan(options, pick)

    changes = {
        "plan": plan,
        "worth_verifying": lambda _, proposal: len(proposal),
        "worth_copying": lambda _, match, room, ends_lease: (
            min(room, (not ends_lease) + pick(DEEPEST)) if match else 0
        ),
        "expects_drafts": property(lambda _: pick(2) == 0),
        "mode": property(lambda _: [*Mode][min(pick(4), Mode.DRAFTS)]),
    }
    with ExitStack() as stack:
        for name, change in changes.items():
            stack.enter_context(mock.patch.object(RequestPlanner, name, change))
        stack.enter_context(mock.patch.object(Choosing, "other", other))
        stack.enter_context(mock.patch.object(OutcomeProposals, "due_ms", lambda *_: float(10 * pick(2))))
        yield
