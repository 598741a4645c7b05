"""Edits of files under every setting: with the file as prediction, by n-gram matches in the prompt, target-only.

A turn is one file and one request under every setting, in an order that is drawn for the turn. A short generation
before it brings the prompt into the services' caches, which the settings share.
"""

from __future__ import annotations

import difflib
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from typing import Any

from paceline.client import Generation
from paceline.protocol.errors import require
from paceline.protocol.generation import ChatMessage, GenerateRequest, SpeculationSettings
from paceline.protocol.proposal import AUTO, NGRAM
from paceline.protocol.sampling import SamplingParams
from paceline_lab.bench.speed.groups import GenerationRunner
from paceline_lab.bench.speed.run import first_difference

PRIMING_TOKENS = 2
ANSWER = "Answer with the whole file in one code block and with nothing else."


@dataclass(frozen=True)
class EditTask:
    """A file, and what is to be changed in it."""

    name: str
    request: str
    language: str
    file: str

    @property
    def message(self) -> ChatMessage:
        """What the model is asked."""
        return ChatMessage("user", f"{self.request} {ANSWER}\n\n```{self.language}\n{self.file}\n```")


@dataclass(frozen=True)
class EditSetting:
    """How an edit is drafted for."""

    speculation: SpeculationSettings
    predicts: bool = False


PLAIN, LOOKUP, PREDICTED = "target-only", "n-gram", "prediction"
AUTO_ALONE, AUTO_PREDICTED = "auto", "auto+prediction"
SETTINGS: Mapping[str, EditSetting] = {
    PLAIN: EditSetting(SpeculationSettings(off=True)),
    LOOKUP: EditSetting(SpeculationSettings(drafter=NGRAM)),
    PREDICTED: EditSetting(SpeculationSettings(drafter=NGRAM), predicts=True),
    AUTO_ALONE: EditSetting(SpeculationSettings(drafter=AUTO)),
    AUTO_PREDICTED: EditSetting(SpeculationSettings(drafter=AUTO), predicts=True),
}


@dataclass(frozen=True)
class EditRun:
    """One setting's answer.

    Attributes:
        tokens_per_second: after the first round.
        wall_s: the whole request at the client; its prompt is cached.
        rows, step_ms: of the target's step of each round.
        difference: index of the first token that is not the first setting's; None: equal.
    """

    tokens: int
    tokens_per_second: float
    wall_s: float
    rounds: int
    proposed: int
    accepted: int
    prediction_accepted: int
    prediction_rejected: int
    rows: tuple[int, ...]
    step_ms: tuple[float, ...]
    difference: int | None

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> EditRun:
        """From a report."""
        return cls(**{**value, "rows": tuple(value["rows"]), "step_ms": tuple(value["step_ms"])})


@dataclass(frozen=True)
class EditStepLine:
    """What the target's steps took in the median of a whole run: ms of one row, and of each row more.

    Where other work disturbs the machine, a run's rounds by this line tell settings apart better than its own time.
    """

    one_row_ms: float
    row_ms: float

    @classmethod
    def of(cls, turns: Sequence[EditTurn]) -> EditStepLine:
        """From the rounds of all settings; a request's first may have computed its prompt, so it doesn't count."""
        runs = [run for turn in turns for run in turn.runs.values()]
        steps = [step for run in runs for step in zip(run.rows[1:], run.step_ms[1:], strict=True)]
        one = statistics.median([ms for rows, ms in steps if rows == 1] or [0.0])
        more = statistics.median([(ms - one) / (rows - 1) for rows, ms in steps if rows > 1] or [0.0])
        return cls(one, max(0.0, more))

    def seconds(self, run: EditRun) -> float:
        """Of all steps of a run."""
        return sum(self.one_row_ms + self.row_ms * (rows - 1) for rows in run.rows) / 1e3


@dataclass(frozen=True)
class EditTurn:
    """One edit's runs by setting; `kept`: share of the answer's tokens that stood in the file, in order."""

    task: str
    number: int
    temperature: float
    kept: float
    runs: Mapping[str, EditRun]

    @property
    def key(self) -> tuple[str, int, float]:
        """What no second turn of a report has."""
        return self.task, self.number, self.temperature

    def ratio(self, setting: str, over: str) -> float:
        """Whole requests of one setting beside another's, in time; above 1: faster."""
        return self.runs[over].wall_s / self.runs[setting].wall_s

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> EditTurn:
        """What `as_json` gave."""
        return cls(**{**value, "runs": {name: EditRun.of_json(run) for name, run in value["runs"].items()}})


@dataclass(frozen=True)
class EditPlan:
    """What is measured; `passes` over all tasks at each temperature, `tokens`: most of an answer."""

    tasks: Sequence[EditTask]
    settings: Sequence[str] = tuple(SETTINGS)
    temperatures: Sequence[float] = (0.0,)
    passes: int = 1
    tokens: int = 320
    seed: int = 0

    def __post_init__(self) -> None:
        require(len(self.tasks) > 0, "task", 0, "one or more")
        for name in self.settings:
            require(name in SETTINGS, "setting", name, f"one of {', '.join(SETTINGS)}")
        require(len(self.settings) > 0, "setting", 0, "one or more")
        require(self.passes >= 1, "passes", self.passes, "at least 1")
        require(self.tokens >= 2, "tokens", self.tokens, "at least 2, to have a time per token")

    def turns(self) -> list[tuple[EditTask, int, float]]:
        """Task, pass and temperature, in the order in which they run."""
        passes = range(self.passes)
        return [(task, number, each) for number in passes for each in self.temperatures for task in self.tasks]


def load_tasks(names: Sequence[str] = ()) -> tuple[EditTask, ...]:
    """The tasks of these names, or all.

    Raises:
        InvalidInput: an unknown name.
    """
    lines = resources.files(__package__).joinpath("tasks.jsonl").read_text().splitlines()
    known = {task.name: task for task in (EditTask(**json.loads(line)) for line in lines)}
    for name in names:
        require(name in known, "task", name, f"one of {', '.join(known)}")
    return tuple(known[name] for name in names or known)


def run_edits(
    plan: EditPlan,
    runner: GenerationRunner,
    on_turn: Callable[[EditTurn], None],
    *,
    skip: Collection[tuple[str, int, float]] = (),
    until: float = math.inf,
) -> None:
    """Run the plan's turns, and begin none after `until`, on the monotonic clock; `skip`: measured before.

    Raises:
        PacelineError: as the services sent it.
    """
    for task, number, temperature in plan.turns():
        if (task.name, number, temperature) in skip:
            continue
        if time.monotonic() > until:
            return
        on_turn(_run_turn(plan, runner, task, number, temperature))


def _run_turn(plan: EditPlan, runner: GenerationRunner, task: EditTask, number: int, temperature: float) -> EditTurn:
    request = GenerateRequest(
        messages=(task.message,),
        sampling=SamplingParams(temperature=temperature).stated(),
        seed=plan.seed + number,
        max_new_tokens=plan.tokens,
    )
    order = [*plan.settings]
    random.Random(f"{task.name} {number} {temperature}").shuffle(order)  # noqa: S311 - no secret
    off = SETTINGS[PLAIN].speculation
    runner.generate(replace(request, max_new_tokens=PRIMING_TOKENS, speculation=off))
    answers = {name: _measured(runner, _asked(request, SETTINGS[name], task)) for name in order}
    first = answers[plan.settings[0]][0]
    return EditTurn(
        task=task.name,
        number=number,
        temperature=temperature,
        kept=share_kept(task.file, first.text),
        runs={name: _run(*answers[name], first.token_ids) for name in plan.settings},
    )


def _asked(request: GenerateRequest, setting: EditSetting, task: EditTask) -> GenerateRequest:
    return replace(request, speculation=setting.speculation, prediction_text=task.file if setting.predicts else "")


def _measured(runner: GenerationRunner, request: GenerateRequest) -> tuple[Generation, float]:
    begun = time.perf_counter()
    return runner.generate(request), time.perf_counter() - begun


def _run(generation: Generation, wall_s: float, first: Sequence[int]) -> EditRun:
    stats = generation.stats
    return EditRun(
        tokens=len(generation.token_ids),
        tokens_per_second=stats.tokens_per_second,
        wall_s=wall_s,
        rounds=stats.rounds,
        proposed=stats.num_draft_tokens,
        accepted=stats.num_accepted_draft_tokens,
        prediction_accepted=stats.prediction_accepted,
        prediction_rejected=stats.prediction_rejected,
        rows=tuple(record.target.rows for record in stats.records),
        step_ms=tuple(record.target.forward_ms + record.target.sample_ms for record in stats.records),
        difference=first_difference(first, generation.token_ids),
    )


def share_kept(file: str, answer: str) -> float:
    """Share of an answer's characters that stood in the file, in their order."""
    matcher = difflib.SequenceMatcher(None, file, answer, autojunk=False)
    return sum(block.size for block in matcher.get_matching_blocks() if block.size >= MEANT) / max(1, len(answer))


MEANT = 4
"""Characters in a row from which on two texts agree not by chance alone."""
