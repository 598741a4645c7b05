"""Ways through the model, from the first state to a final one, and the real code driven along them."""

from __future__ import annotations

from itertools import chain, groupby, repeat

from tests.interleaving.link_model import Bounds, LinkModel, State
from tests.interleaving.oracle import Ran, run
from tests.interleaving.policies import Wish
from tests.interleaving.schedules import Schedule, Setup, TraceOrder
from tests.interleaving.searching import search


def walk(model: LinkModel, choices: bytes) -> list[str]:
    """The steps of one way: each byte chooses among the steps that may come next, then the first ones follow."""
    state, steps = model.first, list[str]()
    left = chain(choices, repeat(0))
    while ways := [*model.next(state)]:
        step, state = ways[next(left) % len(ways)]
        steps.append(step)
    return steps


def follow(bounds: Bounds, steps: list[str]) -> Ran:
    """Have the real code go the same way, as far as it can; what must hold does. Raises as `run`."""
    drafts = int(bounds.drafts)
    setup = Setup("trace", lease=bounds.lease, tokens=bounds.tokens - 1, faults=0, drafts=drafts, noise=0.0)
    plans = [step.split()[1:] for step in steps if step.startswith("plan ")]
    wishes = [Wish(source, int(lease), ahead == "1") for source, lease, ahead in plans]
    return run(setup, Schedule(), TraceOrder(real_steps(steps)), wishes)


def real_steps(steps: list[str]) -> list[str]:
    """The names of a trace's steps where services have numbers, and the coordinator does at once what it can."""
    named = {"t": "t0", "d": "d0", "c>t": "c>t0", "c>d": "c>d0", "t>c": "t0>c", "d>c": "d0>c"}
    named |= {"end t": "end t0", "end d": "end d0"}
    real = [named.get(step, "c") for step in steps]
    return [step for step, times in groupby(real) for _ in (range(1) if step == "c" else times)]


def traces(model: LinkModel) -> list[list[str]]:
    """The shortest way into each situation of a request that the model knows: other steps behind it are the same."""
    found = search(model)
    situations: dict[tuple[object, ...], int] = {}
    for state, number in found.numbers.items():
        situations.setdefault((found.parents[number][1], *_situation(state)), number)
    return [found.trace(number) for number in situations.values()]


def _situation(state: State) -> tuple[object, ...]:
    request, target = state.request, state.t.sessions[0][1] if state.t.sessions else None
    return (
        request.phase, request.plan.source, request.plan.ahead, bool(request.plan.lease), request.started is not None,
        bool(request.session), bool(request.drafting), len(request.answers), request.pending is not None,
        bool(request.prefetched), target is not None and (target.pending is not None, bool(target.prefetched)),
    )  # fmt: skip
