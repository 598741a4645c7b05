"""What the services of a simulated run are: targets, draft services, the ways to them, and how many coordinators."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random
from statistics import NormalDist

from paceline.costs.cost_line import CostLine
from paceline.protocol.errors import require
from paceline_lab.simulate.trace import TracedSetting

Z99 = NormalDist().inv_cdf(0.99)


@dataclass(frozen=True)
class Delay:
    """One way between two processes: constant, or log-normal with this median and 99th percentile. Milliseconds."""

    ms: float = 0.0
    p99_ms: float = 0.0

    def __post_init__(self) -> None:
        require(self.ms >= 0, "ms", self.ms, "at least 0")
        require(
            self.p99_ms == 0 or self.p99_ms >= self.ms > 0, "p99_ms", self.p99_ms, f"0, or at least ms = {self.ms}"
        )

    @property
    def sigma(self) -> float:
        """Of the delay's logarithm; 0: constant."""
        return math.log(self.p99_ms / self.ms) / Z99 if self.p99_ms else 0.0

    def draw_ms(self, random: Random) -> float:
        """Draw one."""
        return self.ms * random.lognormvariate(0.0, self.sigma) if self.sigma else self.ms


@dataclass(frozen=True)
class TargetSpec:
    """A target. Lines as in `TracedSetting`.

    Attributes:
        kv_rows: KV rows that it has; 0: without bound.
        context_ms: a step takes so much longer for each 1000 KV rows that its sessions have behind them.
        max_queue: sessions that may wait for room; more are refused.
        max_step_rows: rows of rounds in a step; further rounds wait for the next. 0: without bound.
        prefix_cache: whether prefixes that requests share are computed once.
    """

    alone: CostLine
    beside: CostLine = field(default_factory=CostLine)
    gap_ms: float = 0.0
    max_sessions: int = 256
    prefill_chunk: int = 256
    kv_rows: int = 0
    context_ms: float = 0.0
    max_queue: int = 1 << 20
    max_step_rows: int = 0
    prefix_cache: bool = False


@dataclass(frozen=True)
class DraftSpec:
    """A draft service. `context_ms` as a target's; `gap_ms`: what each step takes beyond its line."""

    alone: CostLine
    beside: CostLine = field(default_factory=CostLine)
    gap_ms: float = 0.0
    prefill_chunk: int = 256
    context_ms: float = 0.0


def is_slowed_beside(spec: TargetSpec | DraftSpec) -> bool:
    """Whether the other service's work slows a service's steps: they share cores."""
    return spec.beside.is_known and spec.beside != spec.alone


@dataclass(frozen=True)
class CellLayout:
    """The services of one cell. Each target and draft service stands with the delay between it and a coordinator.

    Attributes:
        coordinator_ms: a coordinator's own time for a round, one after the other for all of its sessions.
        proposal_ms: its time for a proposal that comes, and the draft service's for one that leaves.
        max_requests: of a coordinator at once; more are refused.
        idle_targets: how many of the targets, the last ones, are not running at the start.
    """

    targets: tuple[tuple[TargetSpec, Delay], ...]
    drafts: tuple[tuple[DraftSpec, Delay], ...] = ()
    coordinators: int = 1
    coordinator_ms: float = 0.0
    proposal_ms: float = 0.0
    max_requests: int = 1 << 20
    fan_out: int = 0
    lease: int = 16
    max_prefetched: int = 24
    idle_targets: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        require(bool(self.targets), "targets", len(self.targets), "at least 1")
        require(self.coordinators >= 1, "coordinators", self.coordinators, "at least 1")
        require(0 <= self.idle_targets < len(self.targets), "idle_targets", self.idle_targets, "fewer than targets")

    @classmethod
    def of(cls, setting: TracedSetting, coordinators: int = 1, replicas: int = 1) -> CellLayout:
        """A recorded run's: so many targets, and as many draft services, if there are any."""
        target = TargetSpec(
            setting.alone,
            setting.beside,
            setting.gap_ms,
            setting.max_sessions,
            setting.prefill_chunk,
            prefix_cache=True,
        )
        draft = DraftSpec(setting.draft, setting.draft_beside, setting.draft_gap_ms, setting.prefill_chunk)
        drafts = ((draft, Delay(setting.draft_one_way_ms)),) if setting.draft.is_known else ()
        return cls(
            targets=((target, Delay(setting.target_one_way_ms)),) * replicas,
            drafts=drafts * replicas,
            coordinators=coordinators,
            coordinator_ms=setting.coordinator_ms,
            proposal_ms=setting.proposal_ms,
            fan_out=setting.fan_out,
            lease=setting.lease,
            max_prefetched=setting.max_prefetched,
        )
