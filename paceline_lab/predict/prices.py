"""From tokens per second to money: cost per million tokens, and GPUs for a stated traffic. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.protocol.errors import require
from paceline_lab.predict.cycle import PredictedSpeed


@dataclass(frozen=True)
class Prices:
    """Prices of an hour of each service, in one currency, and the traffic to be served.

    Attributes:
        target_hour: price of one target, with all GPUs of its tensor parallelism.
        draft_hour: price of one draft service.
        traffic: tokens per second; 0: not stated.
        target_gpus, draft_gpus: GPUs of one target, and of one draft service.
    """

    target_hour: float = 0.0
    draft_hour: float = 0.0
    traffic: float = 0.0
    target_gpus: int = 1
    draft_gpus: int = 1

    def __post_init__(self) -> None:
        for name in ("target_hour", "draft_hour", "traffic"):
            require(0 <= getattr(self, name) < 1e12, name, getattr(self, name), "in [0, 1e12)")
        for name in ("target_gpus", "draft_gpus"):
            require(1 <= getattr(self, name) <= 1 << 16, name, getattr(self, name), f"in [1, {1 << 16}]")


@dataclass(frozen=True)
class Fleet:
    """Services for a traffic; if none is stated, a single target and the share of a draft that it keeps busy."""

    targets: float
    drafts: float
    gpus: float
    cost_per_million: float


def fleet_of(speed: PredictedSpeed, prices: Prices, *, apart: bool) -> Fleet:
    """Return the services that serve the traffic at one setting.

    Args:
        speed: speed of one target with its sessions.
        prices: prices and the traffic; services are whole, since half a GPU can't be bought.
        apart: whether drafts have hardware of their own; else they cost nothing more.
    """
    drafts_each = speed.draft_busy if apart else 0.0
    targets, drafts = 1.0, drafts_each
    tokens_per_second = speed.tokens_per_second
    if prices.traffic:
        targets = math.ceil(prices.traffic / speed.tokens_per_second)
        drafts = math.ceil(targets * drafts_each)
        tokens_per_second = prices.traffic
    hour = targets * prices.target_hour + drafts * prices.draft_hour
    gpus = targets * prices.target_gpus + drafts * prices.draft_gpus
    return Fleet(targets, drafts, gpus, hour / (3600 * tokens_per_second) * 1e6)
