"""Teacher-forced distillation, in steps that can be replayed bit for bit.

Everything a step does follows from (recipe, rows, weights, optimizer, step
number): batches come from a permutation of the epoch's own seed, the learning
rate from the step number. So a killed run goes on from its last checkpoint and
ends with the weights of an undisturbed one, on equal machines, libraries and
thread counts. A budget in minutes becomes a number of steps once the first few
have been timed, and that number is kept with the checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from paceline.engine.cpu.linear import cpu_has_bfloat16
from paceline.protocol.errors import InvalidInput, require
from paceline.train.corpus import Row, Split, count_learned, replace_file
from paceline.train.student import learned_logits, trained_weights
from paceline.train.teacher import GREEDY_TEMPERATURE, LabelledLogs, Loss, Teacher, position_losses
from paceline.train.vocabulary import DraftVocabulary

TIMED_STEPS = 4
"""Steps that are timed before a budget in minutes becomes a number of steps."""
HELD_OUT_TOKENS = 2048
"""Positions on which the running acceptance is measured; chosen, not tuned."""
_BETAS = (0.9, 0.95)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class TrainRecipe:
    """What decides the weights, beside target, rows and vocabulary.

    `kl_share` and `hybrid_decay` are explained in docs/decisions/2026-11-21-plain-training-loop.md; the other
    defaults are chosen, not tuned. docs/reports/draft-default-2026-11-21.md has what they give.

    Attributes:
        tokens: learned tokens to see, repeats counted; 0: `minutes` decides.
        kl_share: share of the steps that warm up on KL whatever the loss.
        hybrid_decay: η of `Loss.LK`.
        batch_rows: texts per step; each is computed alone, so memory follows the longest text.
        dtype: precision of the matrix products, `float32` or `bfloat16`; the student's weights stay float32.
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

    def __post_init__(self) -> None:
        require(self.tokens >= 0, "tokens", self.tokens, "at least 0")
        require(self.tokens > 0 or self.minutes > 0, "minutes", self.minutes, "above 0")
        require(0 < self.learning_rate < 1, "learning_rate", self.learning_rate, "in (0, 1)")
        require(self.batch_rows >= 1, "batch_rows", self.batch_rows, "at least 1")
        require(self.dtype in _DTYPES, "dtype", self.dtype, " or ".join(_DTYPES))

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch calls it."""
        return _DTYPES[self.dtype]


@dataclass(frozen=True)
class StepReport:
    """One step, for those who watch. `held_out` is Σ min(p, q) on held-out text when it was last measured."""

    step: int
    total_steps: int
    loss: float
    acceptance: float
    tokens: int
    tokens_per_second: float
    seconds_left: float
    held_out: float


class Distiller:
    """A student being trained; `state` and `restore` hold all that decides what comes next."""

    def __init__(
        self,
        target: PreTrainedModel,
        student: PreTrainedModel,
        vocabulary: DraftVocabulary,
        split: Split,
        recipe: TrainRecipe,
    ) -> None:
        self.student = student
        self.vocabulary = vocabulary
        self.recipe = recipe
        self.step_number = 0
        self.tokens_seen = 0
        self.total_steps = _steps_of(recipe, split.train)
        self.held_out = 0.0
        self._teacher = Teacher(target, vocabulary, recipe.torch_dtype)
        self._rows = split.train
        self._weights = trained_weights(student)
        for weight in self._weights.values():
            weight.requires_grad_(True)
        self._optimizer = torch.optim.AdamW(
            self._weights.values(), lr=recipe.learning_rate, betas=_BETAS, weight_decay=recipe.weight_decay
        )
        self._held_out = self._label_held_out(split.held_out)
        self.seconds = 0.0
        """Time that the steps took, those before a resume included."""

    @property
    def done(self) -> bool:
        """Whether every step is taken."""
        return bool(self.total_steps) and self.step_number >= self.total_steps

    def step(self) -> StepReport:
        """Take one optimizer step."""
        began = time.monotonic()
        rows = self._batch(self.step_number)
        rate = self._learning_rate()
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad(set_to_none=True)
        count = count_learned(rows)
        lost = accepted = 0.0
        for row in rows:
            row_loss, row_overlap = self._backward(row, count)
            lost += row_loss
            accepted += row_overlap
        torch.nn.utils.clip_grad_norm_(self._weights.values(), self.recipe.clip_norm)
        self._optimizer.step()
        self.step_number += 1
        self.tokens_seen += count
        self._time(time.monotonic() - began)
        return self._report(lost, accepted / count, count / (time.monotonic() - began))

    @torch.no_grad()
    def measure_held_out(self) -> float:
        """Mean Σ min(p, q) = 1 - TV at temperature 1 on held-out text."""
        overlaps = []
        for row, target in self._held_out:
            draft = torch.log_softmax(self._logits(row), dim=-1)
            overlaps.append(torch.minimum(target.exp(), draft.exp()).sum(-1))
        self.held_out = float(torch.cat(overlaps).mean())
        return self.held_out

    def state(self) -> dict[str, Any]:
        """Weights, optimizer, and where in the data the run is."""
        return {
            "recipe": recipe_facts(self.recipe),
            "d2t": torch.from_numpy(self.vocabulary.d2t),
            "weights": {name: weight.detach() for name, weight in self._weights.items()},
            "optimizer": self._optimizer.state_dict(),
            "step_number": self.step_number,
            "tokens_seen": self.tokens_seen,
            "total_steps": self.total_steps,
            "rows": len(self._rows),
            "held_out": self.held_out,
            "seconds": self.seconds,
        }

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            InvalidInput: it was taken with another recipe, vocabulary or number of rows.
        """
        for name, value in asdict(self.recipe).items():
            kept = state["recipe"].get(name)
            require(kept == value, name, value, f"{kept!r}, as checkpointed")
        same = np.array_equal(state["d2t"].numpy(), self.vocabulary.d2t)
        require(same, "draft vocabulary", self.vocabulary.size, "the checkpoint's own")
        rows = len(self._rows)
        require(state["rows"] == rows, "training rows", rows, f"{state['rows']}, as checkpointed")
        require(set(state["weights"]) == set(self._weights), "layers", len(self._weights), "the checkpoint's own")
        for name, weight in self._weights.items():
            weight.copy_(state["weights"][name])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step_number, self.tokens_seen = state["step_number"], state["tokens_seen"]
        self.total_steps, self.held_out = state["total_steps"], state["held_out"]
        self.seconds = state["seconds"]

    def _backward(self, row: Row, count: int) -> tuple[float, float]:
        """Add one text's share of the gradient; returns its share of the loss, and its summed acceptance."""
        temperature = row.temperature or GREEDY_TEMPERATURE
        target = self._teacher.log_probabilities(row, temperature)
        draft = torch.log_softmax(self._logits(row) / temperature, dim=-1)
        warming = self.step_number < self.recipe.kl_share * (self.total_steps or math.inf)
        kind = Loss.KL if warming else self.recipe.loss
        losses, overlaps = position_losses(LabelledLogs(target, draft), kind, self.recipe.hybrid_decay)
        loss = losses.sum() / count
        loss.backward()
        return float(loss.detach()), float(overlaps.sum())

    def _logits(self, row: Row) -> torch.Tensor:
        """The student's logits [positions, draft size] in float32, computed in the recipe's precision."""
        low = self.recipe.torch_dtype != torch.float32
        with torch.autocast(self.student.device.type, self.recipe.torch_dtype, enabled=low):
            return learned_logits(self.student, row).float()

    def _batch(self, step: int) -> list[Row]:
        """Rows of a step: slices of each epoch's own permutation, the last slice filled from the next epoch."""
        size, total = min(self.recipe.batch_rows, len(self._rows)), len(self._rows)
        places = range(step * size, (step + 1) * size)
        orders = {
            epoch: _permutation(self.recipe.seed, epoch, total) for epoch in {place // total for place in places}
        }
        return [self._rows[orders[place // total][place % total]] for place in places]

    def _learning_rate(self) -> float:
        recipe, step = self.recipe, self.step_number
        if step < recipe.warmup_steps:
            return recipe.learning_rate * (step + 1) / recipe.warmup_steps
        if not self.total_steps:
            return recipe.learning_rate
        share = (step - recipe.warmup_steps) / max(1, self.total_steps - recipe.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
        return recipe.learning_rate * (recipe.final_share + (1 - recipe.final_share) * cosine)

    def _time(self, seconds: float) -> None:
        self.seconds += seconds
        if not self.total_steps and self.step_number >= TIMED_STEPS:
            each = self.seconds / self.step_number
            self.total_steps = max(self.step_number + 1, round(self.recipe.minutes * 60 / each))

    def _report(self, loss: float, acceptance: float, speed: float) -> StepReport:
        each = self.seconds / self.step_number
        left = (self.total_steps - self.step_number) * each if self.total_steps else self.recipe.minutes * 60
        return StepReport(
            self.step_number, self.total_steps, loss, acceptance, self.tokens_seen, speed, left, self.held_out
        )

    def _label_held_out(self, rows: Sequence[Row]) -> list[tuple[Row, torch.Tensor]]:
        """Texts with the target's log-probabilities at temperature 1: the few rows that are looked at often."""
        labelled: list[tuple[Row, torch.Tensor]] = []
        positions = 0
        plain = [row for row in rows if row.temperature == 1] or list(rows)
        for row in plain:
            count = int(row.learned[1:].sum())
            if not count:
                continue
            labelled.append((row, self._teacher.log_probabilities(row, 1.0)))
            positions += count
            if positions >= HELD_OUT_TOKENS:
                break
        return labelled


def fast_dtype(device: str) -> str:
    """`bfloat16` where matrix products are faster in it: GPUs, and CPUs with bfloat16 instructions."""
    if device != "cpu" and torch.cuda.is_available():
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    return "bfloat16" if cpu_has_bfloat16() else "float32"


def recipe_facts(recipe: TrainRecipe) -> dict[str, Any]:
    """The recipe in plain values, for checkpoints and manifests."""
    return {name: str(value) if isinstance(value, Loss) else value for name, value in asdict(recipe).items()}


def _permutation(seed: int, epoch: int, rows: int) -> list[int]:
    order: list[int] = np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(rows).tolist()
    return order


def _steps_of(recipe: TrainRecipe, rows: Sequence[Row]) -> int:
    """Steps that see `tokens` learned tokens; 0 while the speed has to be measured first."""
    require(bool(rows), "training rows", 0, "at least 1")
    if not recipe.tokens:
        return 0
    a_step = count_learned(rows) / len(rows) * min(recipe.batch_rows, len(rows))
    return max(1, math.ceil(recipe.tokens / a_step))


def save_state(file: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint whole or not at all."""
    replace_file(file, lambda temporary: torch.save(state, temporary))


def load_state(file: Path) -> dict[str, Any]:
    """Read a checkpoint.

    Raises:
        InvalidInput: there is none that can be read.
    """
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise InvalidInput.of("checkpoint", str(file), f"one that can be resumed ({error})") from error
    return state


@dataclass(frozen=True)
class Pace:
    """How often a run looks at held-out text and saves, in steps."""

    measure_steps: int = 25
    save_steps: int = 25


def run(distiller: Distiller, checkpoint: Path, pace: Pace, saved: Callable[[], None]) -> Iterator[StepReport]:
    """Train to the end, saving as it goes; `saved` is called after each checkpoint."""
    if not distiller.held_out:
        distiller.measure_held_out()
    while not distiller.done:
        report = distiller.step()
        if distiller.done or distiller.step_number % pace.measure_steps == 0:
            report = replace(report, held_out=distiller.measure_held_out())
        if distiller.done or distiller.step_number % pace.save_steps == 0:
            save_state(checkpoint, distiller.state())
            saved()
        yield report
