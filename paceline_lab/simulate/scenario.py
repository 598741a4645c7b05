"""A cluster to simulate, as its TOML file says it: services, links, traffic, what fails. Times as the names say.

Steps are stated as lines of (rows, ms), or modelled for a GPU and a model (`paceline_lab.predict.roofline`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from paceline.costs.acceptance import FAN_OUT
from paceline.costs.cost_line import CostLine
from paceline.protocol.errors import require
from paceline.protocol.proposal import AUTO, MAX_PROPOSAL_NODES
from paceline.runtime.settings import Settings
from paceline.runtime.sources import load
from paceline_lab.predict.published import SIZES
from paceline_lab.predict.roofline import GPUS, WEIGHTS, ModelPlacement
from paceline_lab.simulate.disturbances import Disturbance, ServiceFailure
from paceline_lab.simulate.policies import Policy
from paceline_lab.simulate.specs import CellLayout, Delay, DraftSpec, TargetSpec
from paceline_lab.simulate.synthetic import PAIRS, SyntheticPair

Count = Annotated[int, Field(ge=1, le=100_000)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]


class LinkDelay(Settings):
    """One way of a link: constant, or log-normal with this median and 99th percentile."""

    ms: NotNegative = 0.2
    p99_ms: NotNegative = 0.0

    @property
    def delay(self) -> Delay:
        """For the simulator."""
        return Delay(self.ms, self.p99_ms)


class ModelledServices(Settings):
    """What targets and draft services have in common.

    Attributes:
        step: (rows, ms) points; else a GPU and a model, of which steps and KV rows are modelled.
        context_ms: a step takes so much longer for each 1000 tokens that its sessions have behind them; 0: as
            modelled, or nothing where steps are stated.
        gap_ms: what lies between a step of a target and the next; what a step of a draft takes beyond its line.
        price_per_hour: of one service with all its GPUs.
    """

    count: Count = 1
    step: tuple[tuple[Positive, NotNegative], ...] = ()
    gpu: str = ""
    model: str = ""
    tensor_parallel: int = Field(1, ge=1, le=64)
    weights: str = "bf16"
    link: LinkDelay = LinkDelay()
    prefill_chunk: int = Field(2048, ge=1)
    context_ms: NotNegative = 0.0
    gap_ms: NotNegative = 0.0
    price_per_hour: NotNegative = 0.0

    @model_validator(mode="after")
    def _steps_are_known(self) -> Self:
        require(bool(self.step) != bool(self.gpu), "step", self.step, "given, or else gpu and model, not both")
        if self.gpu:
            require(self.gpu in GPUS, "gpu", self.gpu, f"one of: {', '.join(GPUS)}")
            require(self.model in SIZES, "model", self.model, f"one of: {', '.join(SIZES)}")
            require(self.weights in WEIGHTS, "weights", self.weights, f"one of: {', '.join(WEIGHTS)}")
            self.place.check_fits()
        return self

    @property
    def place(self) -> ModelPlacement:
        """The model on its GPUs, where steps are modelled."""
        return ModelPlacement(SIZES[self.model], self.gpu, self.tensor_parallel, self.weights)

    @property
    def line(self) -> CostLine:
        """A step by its rows, without a context."""
        return CostLine(self.step) if self.step else self.place.line()

    @property
    def read_ms(self) -> float:
        """That each 1000 tokens behind a session of a step take."""
        return self.context_ms or (self.place.kv_ms(1000) if self.gpu else 0.0)

    @property
    def gpus(self) -> int:
        """Of all of them."""
        return self.count * self.tensor_parallel


class TargetGroup(ModelledServices):
    """Targets that are alike; 0 `kv_rows`: without bound, or as many as fit beside the weights of a named model."""

    max_sessions: int = Field(256, ge=1)
    max_queue: int = Field(1024, ge=1)
    max_step_rows: int = Field(1024, ge=0)
    kv_rows: int = Field(0, ge=0)
    prefix_cache: bool = True

    @property
    def rows(self) -> int:
        """KV rows of each; 0: without bound."""
        return self.kv_rows or (self.place.kv_tokens if self.gpu else 0)

    @property
    def spec(self) -> TargetSpec:
        """For the simulator."""
        return TargetSpec(
            alone=self.line,
            gap_ms=self.gap_ms,
            max_sessions=self.max_sessions,
            prefill_chunk=self.prefill_chunk,
            kv_rows=self.rows,
            context_ms=self.read_ms,
            max_queue=self.max_queue,
            max_step_rows=self.max_step_rows,
            prefix_cache=self.prefix_cache,
        )


class DraftGroup(ModelledServices):
    """Draft services that are alike."""

    @property
    def spec(self) -> DraftSpec:
        """For the simulator."""
        return DraftSpec(self.line, gap_ms=self.gap_ms, prefill_chunk=self.prefill_chunk, context_ms=self.read_ms)


class CoordinatorGroup(Settings):
    """Coordinators. `round_ms`: what a round costs one, all of its sessions in turn."""

    count: Count = 1
    round_ms: NotNegative = 0.05
    max_requests: int = Field(256, ge=1)
    price_per_hour: NotNegative = 0.0


class SpeculationScenario(Settings):
    """`k`: as `paceline simulate --k` takes one. The rest as coordinators have it."""

    k: str = AUTO
    fan_out: int = Field(FAN_OUT, ge=0, le=16)
    lease: int = Field(16, ge=0)
    max_prefetched: int = Field(24, ge=0)


class Lengths(Settings):
    """Tokens: log-normal with this median and 99th percentile, or always the same where they are equal."""

    median: int = Field(256, ge=1, le=1 << 20)
    p99: int = Field(0, ge=0, le=1 << 20)

    @model_validator(mode="after")
    def _rises(self) -> Self:
        require(not self.p99 or self.p99 >= self.median, "p99", self.p99, f"0, or at least median = {self.median}")
        return self

    @property
    def most(self) -> int:
        """The longest: what the distribution has beyond twice its 99th percentile is cut off."""
        return 2 * self.p99 if self.p99 > self.median else self.median


class Traffic(Settings):
    """Requests that are alike.

    Attributes:
        requests_per_second: Poisson arrivals; or `sessions` at once, each followed by the next, behind a
            refusal after a pause; or `arrivals`, a file with the seconds of one arrival a line.
        pair: how the draft does: a name of `synthetic`; or `acceptance`, the same everywhere; or
            `trace`, a recorded run's texts.
        prefix_tokens, prefixes: length of the prompts' common beginnings, and how many different ones there are.
        tokens_per_minute, requests_per_minute: the tenant's limits, as keys have them; 0: none.
    """

    name: str = "all"
    requests_per_second: NotNegative = 0.0
    sessions: int = Field(0, ge=0)
    arrivals: Path | None = None
    prompt_tokens: Lengths = Lengths(median=512)
    answer_tokens: Lengths = Lengths(median=256)
    pair: str = "good"
    acceptance: float | None = Field(None, ge=0, le=1)
    trace: Path | None = None
    prefix_tokens: int = Field(0, ge=0, lt=1 << 20)
    prefixes: int = Field(1, ge=1, le=128)
    tenant: str = ""
    tokens_per_minute: int = Field(0, ge=0)
    requests_per_minute: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _arrives(self) -> Self:
        given = [self.requests_per_second > 0, self.sessions > 0, self.arrivals is not None]
        limit = "given, or else sessions or arrivals, and no two of them"
        require(sum(given) == 1, "requests_per_second", self.requests_per_second, limit)
        require(self.pair in PAIRS, "pair", self.pair, f"one of: {', '.join(PAIRS)}")
        most = self.prompt_tokens.median
        require(
            self.prefix_tokens < most, "prefix_tokens", self.prefix_tokens, f"below prompt_tokens.median = {most}"
        )
        return self

    @property
    def synthetic(self) -> SyntheticPair:
        """The pair, where it is not recorded."""
        return PAIRS[self.pair] if self.acceptance is None else SyntheticPair.even(self.acceptance)


class StatedFailure(Settings):
    """A service that ends and comes back empty."""

    service: str
    index: int = Field(0, ge=0)
    at_seconds: NotNegative
    down_seconds: Positive = 10.0

    @property
    def failure(self) -> ServiceFailure:
        """For the simulator."""
        return ServiceFailure(1e3 * self.at_seconds, self.service, self.index, 1e3 * self.down_seconds)


class Autoscaling(Settings):
    """Targets come and go by their mean load in sessions, those that wait included; `least` of them always run."""

    least: int = Field(1, ge=1)
    up_above: Positive
    down_below: NotNegative
    every_seconds: Positive = 5.0
    start_seconds: NotNegative = 60.0


class Scenario(Settings):
    """A cluster of `cells` that are alike and share nothing, of which `simulated_cells` are simulated.

    Attributes:
        seconds: of arrivals; `warmup_seconds` of them are not counted.
        drain_seconds: how long those that have arrived may take after that.
    """

    seed: int = Field(0, ge=0)
    seconds: Positive = 60.0
    warmup_seconds: NotNegative = 10.0
    drain_seconds: NotNegative = 60.0
    cells: int = Field(1, ge=1)
    simulated_cells: int = Field(1, ge=1)
    coordinators: CoordinatorGroup = CoordinatorGroup()
    targets: tuple[TargetGroup, ...] = Field(min_length=1)
    drafts: tuple[DraftGroup, ...] = ()
    speculation: SpeculationScenario = SpeculationScenario()
    traffic: tuple[Traffic, ...] = Field(min_length=1)
    failures: tuple[StatedFailure, ...] = ()
    failure_notice_ms: NotNegative = 1.0
    autoscaling: Autoscaling | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        limit = f"below seconds = {self.seconds:g}"
        require(self.warmup_seconds < self.seconds, "warmup_seconds", self.warmup_seconds, limit)
        cells = f"at most cells = {self.cells}"
        require(self.simulated_cells <= self.cells, "simulated_cells", self.simulated_cells, cells)
        targets = sum(each.count for each in self.targets)
        least = self.autoscaling.least if self.autoscaling else 1
        require(least <= targets, "autoscaling.least", least, f"at most the {targets} targets")
        drafts = bool(self.drafts) or self.speculation.k in (AUTO, "0")
        require(drafts, "speculation.k", self.speculation.k, f"0 or {AUTO}, since there are no drafts")
        self._rows_suffice()
        return self

    def _rows_suffice(self) -> None:
        """Refuse traffic with a request for which no target has the KV rows."""
        for traffic in self.traffic:
            needed = traffic.prompt_tokens.most + traffic.answer_tokens.most + MAX_PROPOSAL_NODES
            for target in self.targets:
                limit = f"at least {needed}, for the longest request of traffic {traffic.name}"
                require(not target.rows or target.rows >= needed, "targets.kv_rows", target.rows, limit)

    @classmethod
    def read(cls, file: Path) -> Scenario:
        """Read a TOML file.

        Raises:
            InvalidInput: naming key, value, limit and file.
        """
        return load(cls, file, {}).config

    @property
    def gpus(self) -> int:
        """Of the whole cluster."""
        return self.cells * sum(each.gpus for each in (*self.targets, *self.drafts))

    @property
    def policy(self) -> Policy:
        """What coordinators plan with."""
        return Policy.parse(self.speculation.k, self.speculation.fan_out)

    def layout(self, seed: int) -> CellLayout:
        """The services of one cell."""
        targets = tuple((each.spec, each.link.delay) for each in self.targets for _ in range(each.count))
        drafts = tuple((each.spec, each.link.delay) for each in self.drafts for _ in range(each.count))
        coordinators, speculation = self.coordinators, self.speculation
        return CellLayout(
            targets=targets,
            drafts=drafts,
            coordinators=coordinators.count,
            coordinator_ms=coordinators.round_ms,
            max_requests=coordinators.max_requests,
            fan_out=speculation.fan_out,
            lease=speculation.lease,
            max_prefetched=speculation.max_prefetched,
            idle_targets=len(targets) - self.autoscaling.least if self.autoscaling else 0,
            seed=seed,
        )

    @property
    def disturbance(self) -> Disturbance:
        """What fails in a cell."""
        return Disturbance(failures=tuple(each.failure for each in self.failures), notice_ms=self.failure_notice_ms)
