"""What decides the weights of a training run, beside target, rows and vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from paceline.engine.cpu.linear import cpu_has_bfloat16
from paceline.protocol.errors import require
from paceline_training.losses import Loss

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class JointRecipe:
    """How the target is trained beside its drafter (`paceline_training.joint`). All chosen, not tuned.

    Attributes:
        target_learning_rate: peak of the target's own schedule, far below the drafter's.
        drafter_weight: weight of the drafter's loss; the target's distance from its original has weight 1.
        alone_share: share of the budget in which the drafter is trained alone, before its gradients reach the target.
    """

    target_learning_rate: float = 2e-5
    drafter_weight: float = 0.2
    alone_share: float = 1 / 3

    def __post_init__(self) -> None:
        rate, weight, share = self.target_learning_rate, self.drafter_weight, self.alone_share
        require(0 < rate < 1, "target_learning_rate", rate, "in (0, 1)")
        require(weight > 0, "drafter_weight", weight, "above 0")
        require(0 < share < 1, "alone_share", share, "in (0, 1)")


@dataclass(frozen=True)
class TrainRecipe:
    """What decides the weights, beside target, rows and vocabulary.

    `kl_share` and `hybrid_decay` are explained in docs/decisions/2026-11-21-plain-training-loop.md; the other
    defaults are chosen, not tuned. docs/reports/draft-default-2026-11-21.md has what they give.

    Attributes:
        tokens: number of learned tokens to train on, repeats included; 0: `minutes` decides.
        kl_share: share of the steps that warm up on KL whatever the loss.
        hybrid_decay: η of `Loss.LK`.
        batch_rows: texts per step; each is computed alone, so memory follows the longest text.
        dtype: precision of the matrix products, `float32` or `bfloat16`; the student's weights stay float32.
        focus: weight of a position's loss by its cell of text (`paceline_training.focus`); empty: all count alike.
        joint: how the target is trained with its drafter; None: the target stays as it is.
    """

    loss: Loss = Loss.LK
    tokens: int = 0
    minutes: float = 10.0
    learning_rate: float = 1e-3
    final_share: float = 0.05
    warmup_steps: int = 20
    kl_share: float = 0.2
    hybrid_decay: float = 3.0
    batch_rows: int = 8
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    seed: int = 0
    dtype: str = "float32"
    focus: Mapping[str, float] = field(default_factory=dict)
    joint: JointRecipe | None = None

    def __post_init__(self) -> None:
        require(self.tokens >= 0, "tokens", self.tokens, "at least 0")
        require(self.tokens > 0 or self.minutes > 0, "minutes", self.minutes, "above 0")
        require(0 < self.learning_rate < 1, "learning_rate", self.learning_rate, "in (0, 1)")
        require(self.batch_rows >= 1, "batch_rows", self.batch_rows, "at least 1")
        require(self.dtype in _DTYPES, "dtype", self.dtype, " or ".join(_DTYPES))
        exact = self.joint is None or self.dtype == "float32"
        require(exact, "dtype", self.dtype, "float32 with --joint: the target's small steps are lost in others")

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch calls it."""
        return _DTYPES[self.dtype]


def fast_dtype(device: str) -> str:
    """`bfloat16` where matrix products are faster in it: GPUs, and CPUs with bfloat16 instructions."""
    if device != "cpu" and torch.cuda.is_available():
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    return "bfloat16" if cpu_has_bfloat16() else "float32"


def recipe_facts(recipe: TrainRecipe) -> dict[str, Any]:
    """The recipe in plain values, for checkpoints and manifests."""
    return {name: str(value) if isinstance(value, Loss) else value for name, value in asdict(recipe).items()}
