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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from paceline.protocol.errors import InvalidInput, require
from paceline.runtime.files import replace_file
from paceline_training.corpus import Row, Split, count_learned_tokens
from paceline_training.losses import LabelledLogs, Loss, position_losses
from paceline_training.recipe import TrainRecipe, recipe_facts
from paceline_training.teacher import GREEDY_TEMPERATURE, Teacher
from paceline_training.trainee import DepthLogits, Lesson, Trainee

TIMED_STEPS = 4
"""Steps that are timed before a budget in minutes becomes a number of steps."""
HELD_OUT_TOKENS = 2048
"""Positions on which the running acceptance is measured; chosen, not tuned."""
_BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class StepReport:
    """Figures of one step. `held_out` is Σ min(p, q) on held-out text, as last measured."""

    step: int
    total_steps: int
    loss: float
    acceptance: float
    tokens: int
    tokens_per_second: float
    seconds_left: float
    held_out: float


class Distiller:
    """Trains one trainee. `state` returns all that decides the next steps, and `restore` loads it."""

    def __init__(
        self,
        target: PreTrainedModel,
        trainee: Trainee,
        split: Split,
        recipe: TrainRecipe,
        position_weights: Mapping[Row, NDArray[np.float32]] = MappingProxyType({}),
        rate_shares: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """`rate_shares`: factor of the learning rate by a weight's name; 1 for weights that it doesn't name."""
        self.trainee = trainee
        self._position_weights = position_weights
        self.recipe = recipe
        self.step_number = 0
        self.tokens_seen = 0
        self.total_steps = _steps_of(recipe, split.train)
        self.held_out = 0.0
        self._teacher = Teacher(target, trainee.vocabulary, recipe.torch_dtype, trainee.need)
        self._rows = split.train
        self._device = target.device.type
        self._weights = dict(trainee.weights())
        for weight in self._weights.values():
            weight.requires_grad_(True)
        groups = _by_share(self._weights, rate_shares)
        self._rate_shares = tuple(groups)
        params = [{"params": weights} for weights in groups.values()]
        self._optimizer = torch.optim.AdamW(
            params, lr=recipe.learning_rate, betas=_BETAS, weight_decay=recipe.weight_decay
        )
        self._held_out = self._label_held_out(split.held_out)
        self.seconds = 0.0
        """Time that all steps took, with those before a resume."""

    @property
    def is_done(self) -> bool:
        """Whether every step is taken."""
        return bool(self.total_steps) and self.step_number >= self.total_steps

    def step(self) -> StepReport:
        """Take one optimizer step."""
        began = time.monotonic()
        rows = self._batch(self.step_number)
        rate = self._learning_rate()
        for group, share in zip(self._optimizer.param_groups, self._rate_shares, strict=True):
            group["lr"] = rate * share
        self._optimizer.zero_grad(set_to_none=True)
        count = count_learned_tokens(rows)
        loss = accepted = 0.0
        for row in rows:
            row_loss, row_overlap = self._backward(row, count)
            loss += row_loss
            accepted += row_overlap
        torch.nn.utils.clip_grad_norm_(self._weights.values(), self.recipe.clip_norm)
        self._optimizer.step()
        self.step_number += 1
        self.tokens_seen += count
        self._time(time.monotonic() - began)
        return self._report(loss, accepted / count, count / (time.monotonic() - began))

    @torch.no_grad()
    def measure_held_out(self) -> float:
        """Mean Σ min(p, q) = 1 - TV of the first drafted token at temperature 1 on held-out text."""
        overlaps = []
        for lesson in self._held_out:
            first = self._draft_logits(lesson)[0]
            draft = torch.log_softmax(first.logits.float(), dim=-1)
            overlaps.append(torch.minimum(first.labels_of(lesson).exp(), draft.exp()).sum(-1))
        self.held_out = float(torch.cat(overlaps).mean())
        return self.held_out

    def state(self) -> dict[str, Any]:
        """Weights, optimizer state, and the run's place in the data."""
        return {
            "recipe": recipe_facts(self.recipe),
            "depth": self.trainee.depth,
            "d2t": torch.from_numpy(self.trainee.vocabulary.d2t),
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
        """Load what `state` returned.

        Raises:
            InvalidInput: it comes from another recipe, depth, vocabulary or number of rows.
        """
        # A setting that is newer than the checkpoint had the effect of its default.
        checkpoint_recipe = {**asdict(TrainRecipe()), **state["recipe"]}
        for name, value in asdict(self.recipe).items():
            previous = checkpoint_recipe[name]
            require(previous == value, name, value, f"{previous!r}, as checkpointed")
        depth = state.get("depth", 1)
        require(depth == self.trainee.depth, "depth", self.trainee.depth, f"{depth}, as checkpointed")
        vocabulary = self.trainee.vocabulary
        same = np.array_equal(state["d2t"].numpy(), vocabulary.d2t)
        require(same, "draft vocabulary", vocabulary.size, "the checkpoint's own")
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
        """Add one text's share of the gradient; returns its share of the loss, and its first depth's acceptance."""
        temperature = row.temperature or GREEDY_TEMPERATURE
        lesson = self._teacher.lesson(row, temperature)
        warming = self.step_number < self.recipe.kl_share * (self.total_steps or math.inf)
        kind = Loss.KL if warming else self.recipe.loss
        weights = self._loss_weights(row, lesson.places.size)
        total, accepted = torch.zeros(()), []
        for depth in self._draft_logits(lesson):
            draft = torch.log_softmax(depth.logits.float() / temperature, dim=-1)
            logs = LabelledLogs(depth.labels_of(lesson), draft)
            losses, overlaps = position_losses(logs, kind, self.recipe.hybrid_decay)
            depth_weights = weights if depth.label_rows is None else weights[depth.label_rows]
            total = total + depth.weight * (depth_weights * losses).sum()
            total = total if depth.penalty is None else total + depth.penalty
            accepted.append(float(overlaps.sum()))
        loss = total / count
        loss.backward()
        return float(loss.detach()), accepted[0]

    def _loss_weights(self, row: Row, count: int) -> torch.Tensor:
        """Weight of each learned token in the loss: [count], on the trainee's device."""
        row_weights = self._position_weights.get(row)
        weights = torch.ones(count) if row_weights is None else torch.from_numpy(row_weights)
        return weights.to(self._device)

    def _draft_logits(self, lesson: Lesson) -> Sequence[DepthLogits]:
        """The trainee's logits, computed in the recipe's precision."""
        low = self.recipe.torch_dtype != torch.float32
        with torch.autocast(self._device, self.recipe.torch_dtype, enabled=low):
            return self.trainee.draft_logits(lesson)

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
            step_seconds = self.seconds / self.step_number
            self.total_steps = max(self.step_number + 1, round(self.recipe.minutes * 60 / step_seconds))

    def _report(self, loss: float, acceptance: float, speed: float) -> StepReport:
        step_seconds = self.seconds / self.step_number
        steps_left = self.total_steps - self.step_number
        seconds_left = steps_left * step_seconds if self.total_steps else self.recipe.minutes * 60
        return StepReport(
            self.step_number, self.total_steps, loss, acceptance, self.tokens_seen, speed, seconds_left, self.held_out
        )

    def _label_held_out(self, rows: Sequence[Row]) -> list[Lesson]:
        """The held-out texts that are measured often, with the target's distributions at temperature 1."""
        lessons: list[Lesson] = []
        positions = 0
        plain = [row for row in rows if row.temperature == 1] or list(rows)
        for row in plain:
            lesson = self._teacher.lesson(row, 1.0)
            if not lesson.places.size:
                continue
            lessons.append(lesson)
            positions += lesson.places.size
            if positions >= HELD_OUT_TOKENS:
                break
        return lessons


def _by_share(
    weights: Mapping[str, torch.nn.Parameter], shares: Mapping[str, float]
) -> dict[float, list[torch.nn.Parameter]]:
    groups: dict[float, list[torch.nn.Parameter]] = {}
    for name, weight in weights.items():
        groups.setdefault(shares.get(name, 1.0), []).append(weight)
    return groups


def _permutation(seed: int, epoch: int, rows: int) -> list[int]:
    order: list[int] = np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(rows).tolist()
    return order


def _steps_of(recipe: TrainRecipe, rows: Sequence[Row]) -> int:
    """Steps that see `tokens` learned tokens; 0 while the speed has to be measured first."""
    require(bool(rows), "training rows", 0, "at least 1")
    if not recipe.tokens:
        return 0
    a_step = count_learned_tokens(rows) / len(rows) * min(recipe.batch_rows, len(rows))
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
    """How often a run measures held-out text and saves, in steps."""

    measure_steps: int = 25
    save_steps: int = 25


def run(distiller: Distiller, checkpoint: Path, pace: Pace, on_save: Callable[[], None]) -> Iterator[StepReport]:
    """Train to the end and save checkpoints; `on_save` is called after each of them."""
    if not distiller.held_out:
        distiller.measure_held_out()
    while not distiller.is_done:
        report = distiller.step()
        if distiller.is_done or distiller.step_number % pace.measure_steps == 0:
            report = replace(report, held_out=distiller.measure_held_out())
        if distiller.is_done or distiller.step_number % pace.save_steps == 0:
            save_state(checkpoint, distiller.state())
            on_save()
        yield report
