"""What the prior of a fresh request is worth: the planner's own code, in the simulator, on the study's requests.

A request begins with what is known of the drafter from all requests before it. What a predictor of its acceptance
could bring at best is what comes of telling the planner the request's own ranks beforehand, which no predictor does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.predictors.drafters import AS_IT_IS
from benchmarks.predictors.reading import StudiedText
from benchmarks.simulator.coordinator import CoordinatorProcess
from benchmarks.simulator.grid import GridCase
from benchmarks.simulator.planned import PlannedPolicy, PlannedSession, SimulatedPlanner
from benchmarks.simulator.run import simulate
from benchmarks.simulator.trace import TracedRequest
from coordinator.policy.seen import Seen
from paceline.protocol.proposal import AUTO, Acceptance

NOTHING, POOL, FORETOLD = "nothing known", "earlier requests", "foretold"
SURE = 16
"""Times that a request is foretold: what is believed before anything is known then counts next to nothing."""
PRIORS = (NOTHING, POOL, FORETOLD)
SERVICES = {
    "rows cheap, draft quick": GridCase("middling", 1, "cheap", "quick").setting,
    "rows dear, draft slow": GridCase("middling", 1, "dear", "slow").setting,
}
"""Of the planner's grid; the pair's name says nothing here, requests are the study's."""


@dataclass(frozen=True)
class PriorWorth:
    """Goodput, tokens per second, one request after the other, by what a fresh request begins with."""

    pair: str
    temperature: float
    services: str
    nothing_known: float
    earlier_requests: float
    foretold: float

    @property
    def most(self) -> float:
        """Share that a perfect prior would add to the pool's."""
        return self.foretold / self.earlier_requests - 1


def requests_of(texts: Sequence[StudiedText]) -> tuple[TracedRequest, ...]:
    """The study's answers as the simulator has them; without matches, which have a prior of their own."""
    return tuple(
        TracedRequest(
            tuple(text.answer.drafters[AS_IT_IS].ranks.tolist()),
            tuple(text.answer.drafters[AS_IT_IS].confidence.clip(0, 1).tolist()),
            (0,) * text.answer.target.places.size,
            (0,) * text.answer.target.places.size,
            prompt_tokens=text.prompt.tokens.size,
        )
        for text in texts
    )


def prior_worth(pair: str, temperature: float, requests: Sequence[TracedRequest]) -> list[PriorWorth]:
    """Each prior at both kinds of services."""
    found: list[PriorWorth] = []
    for name, setting in SERVICES.items():
        policies = [PriorPolicy(requests, prior, greedy=temperature == 0) for prior in PRIORS]
        speeds = [simulate(setting, requests, policy).tokens_per_second for policy in policies]
        found.append(PriorWorth(pair, temperature, name, *speeds))
    return found


class PriorPolicy(PlannedPolicy):
    """The planner, each of whose requests begins with a stated prior; requests are asked for in their order."""

    def __init__(self, requests: Sequence[TracedRequest], prior: str, *, greedy: bool) -> None:
        super().__init__(greedy=greedy)
        self._requests = iter(requests)
        self._prior = prior

    def session(self, home: CoordinatorProcess) -> PlannedSession:
        """Of a new request."""
        planner = self._planners.setdefault(home, SimulatedPlanner(home)).planner
        pool = planner.seen(AUTO, Acceptance.COUPLED, greedy=self._greedy)
        request = next(self._requests)
        if self._prior != POOL:
            known = foretold(request) if self._prior == FORETOLD else Seen()
            pool.by_depth, pool.by_rank, pool.by_q = known.by_depth, known.by_rank, known.by_q
        return super().session(home)


def foretold(request: TracedRequest) -> Seen:
    """What would be known of a drafter had it been seen on this very request alone, often enough to be sure."""
    seen, run = Seen(), 0
    for rank, chance in [*zip(request.ranks, request.chances, strict=True)] * SURE:
        seen.take_rank(rank, chance, run)
        run = run + 1 if rank == 1 else 0
    return seen
