"""`paceline bench load`: many requests at once on one model, drafting off, at constant lengths and as planned."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate

from paceline.protocol.errors import require
from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.protocol.proposal import AUTO
from paceline.protocol.sampling import SamplingParams
from paceline_lab.bench.ab.arms import Arm, ArmServices, Case, Stage
from paceline_lab.bench.prompts import Prompt
from paceline_lab.bench.record import MAX_SESSIONS


class Arrivals(StrEnum):
    """How the requests of a wave arrive."""

    TOGETHER = "together"
    POISSON = "poisson"
    """At a rate, each independently of the others."""


@dataclass(frozen=True)
class LoadPlan:
    """Waves of requests.

    Attributes:
        prompts: whose first chats are sent, in turn; a wave goes on where the one before ended.
        sessions: requests of a wave; a case for each.
        lengths: constant numbers of proposed tokens, beside drafting off and `auto`.
        tokens: of each answer, whose end is ignored.
        arrivals, rate: how a wave arrives, and how many requests a second where that is at a rate.
        over_http: requests are streamed chat completions.
        waves: that are counted, each under every arm.
    """

    prompts: Sequence[Prompt]
    sessions: Sequence[int] = (1, 4, 8, 16, 64)
    lengths: Sequence[int] = ()
    tokens: int = 96
    temperature: float = 0.0
    arrivals: Arrivals = Arrivals.TOGETHER
    rate: float = 4.0
    over_http: bool = False
    waves: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        require(bool(self.prompts), "prompts", self.prompts, "one or more")
        require(bool(self.sessions), "sessions", self.sessions, "one number or more")
        for count in self.sessions:
            require(1 <= count <= MAX_SESSIONS, "sessions", count, f"in [1, {MAX_SESSIONS}]")
        require(self.tokens >= 2, "tokens", self.tokens, "at least 2, to have a time per token")
        require(self.waves >= 1, "waves", self.waves, "at least 1")
        require(self.rate > 0, "rate", self.rate, "above 0")
        SamplingParams(temperature=self.temperature)

    def stage(self, services: ArmServices) -> Stage:
        """Return the arms, off first, and the cases. All share services: what one learned the next one knows."""
        off, auto = SpeculationSettings(off=True), SpeculationSettings()
        settings = {"off": off, **{f"k = {k}": replace(auto, num_draft_tokens=k) for k in self.lengths}, AUTO: auto}
        arms = [Arm(name, services, speculation, over_http=self.over_http) for name, speculation in settings.items()]
        return Stage(services.model, arms, [*self._cases()])

    def _cases(self) -> Iterator[Case]:
        for sessions in self.sessions:
            # The wave before the first warms up, with the requests of the last one.
            waves = [[self._request(wave * sessions + one) for one in range(sessions)] for wave in range(self.waves)]
            yield Case(f"{sessions} at once", waves, tuple(self._starts_s(sessions)))

    def _starts_s(self, sessions: int) -> Iterator[float]:
        if self.arrivals is Arrivals.POISSON:
            gaps = random.Random(self.seed)  # noqa: S311 - no secret
            yield from accumulate(gaps.expovariate(self.rate) for _ in range(sessions))

    def _request(self, number: int) -> GenerateRequest:
        prompt = self.prompts[number % len(self.prompts)]
        return prompt.request(self.tokens, temperature=self.temperature, seed=self.seed + number)
