"""The grid: passes and times first, with nothing served; then the same settings served in turns."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.costs.cost_line import CostLine
from paceline.models.tokenizer import Tokenizer
from paceline.protocol.proposal import NGRAM, NONE
from paceline.protocol.records import GenerationStats
from paceline_lab.bench.predicted.cells import GridCell, ServedRounds
from paceline_lab.bench.predicted.serving import FixedPlan, GridServices, drafter_names
from paceline_lab.bench.prompts import Prompt
from paceline_lab.plan.options import PlanOptions
from paceline_lab.plan.readers import load_readers
from paceline_lab.plan.run import sample_facts
from paceline_lab.plan.times import step_times
from paceline_lab.predict.cycle import StepTimes, just_in_time, target_only
from paceline_lab.predict.positions_cache import PositionsCache
from paceline_lab.predict.reading import read_texts
from paceline_lab.predict.rounds import ProposalShape, positions_of
from paceline_lab.predict.sample import texts_at
from paceline_lab.predict.verdict import Candidates
from paceline_lab.simulate.measured import measured_setting
from paceline_training.user_data import UserData

Advance = Callable[[str], None]


@dataclass(frozen=True)
class GridOptions:
    """Options of the grid. Prompts come from the benchmarks: the sample's file names nothing here.

    Attributes:
        plan: target, drafters, temperatures, shapes, loads, and the settings of the passes.
        prompts: the prompts of each kind.
        requests: number of requests of each cell.
        tokens: most tokens of an answer.
        turns: number of turns; each serves a part of every cell's requests.
        repeats: draws of each prompt that prediction reads at temperatures above 0, with seeds of their own.
    """

    plan: PlanOptions
    prompts: Mapping[str, Sequence[Prompt]]
    requests: int
    tokens: int
    repeats: int = 2
    turns: int = 2

    @property
    def shapes(self) -> list[ProposalShape]:
        """Return the shapes that propose something."""
        return [shape for shape in self.plan.shapes if shape.depth]


Predictions = Mapping[tuple[str, float], Candidates]
"""Candidates by kind and temperature."""


def predict_grid(options: GridOptions, advance: Advance) -> tuple[Predictions, StepTimes]:
    """Run both passes over every kind, and time the steps; all models are gone again when it returns."""
    readers = load_readers(options.plan)
    times = step_times(options.plan, readers)
    predictions: dict[tuple[str, float], Candidates] = {}
    for kind, prompts in options.prompts.items():
        for temperature in options.plan.sample.temperatures:
            data = _prompts_of(prompts, readers.tokenizer, options.repeats if temperature > 0 else 1)
            folder = options.plan.work / kind / f"{temperature:g}"
            cache = PositionsCache(folder / "positions", sample_facts(options.plan, readers, data))
            texts = texts_at(options.plan.sample, temperature, data, readers.passes, readers.tokenizer, folder)
            read = read_texts(readers.passes, texts, cache)
            names = (NGRAM, *readers.models)
            positions = {name: positions_of(read, name, temperature) for name in names}
            predictions[kind, temperature] = Candidates(positions, options.plan.shapes)
            advance(f"{kind} at temperature {temperature:g} is read")
    del readers
    gc.collect()
    return predictions, times


def _prompts_of(prompts: Sequence[Prompt], tokenizer: Tokenizer, repeats: int) -> UserData:
    """Render the prompts as the services do, each `repeats` times: each time has a draw of its own."""
    return UserData((), tuple(tokenizer.render_chat(prompt.chats[0]) for prompt in prompts) * repeats)


@dataclass(frozen=True)
class GridSetting:
    """A setting that is served in turn: a drafter's shape, or target-only."""

    kind: str
    temperature: float
    load: int
    drafter: str = NONE
    shape: ProposalShape | None = None

    @property
    def plain(self) -> GridSetting:
        """Return target-only under the same conditions."""
        return GridSetting(self.kind, self.temperature, self.load)

    def plan(self, options: GridOptions, names: Mapping[str, str], turn: int) -> FixedPlan:
        """Return the plan of its requests of one turn: each turn has other prompts and seeds."""
        requests = max(self.load, math.ceil(options.requests / options.turns))
        plan = FixedPlan(
            options.prompts[self.kind],
            requests=requests,
            sessions=self.load,
            tokens=options.tokens,
            temperature=self.temperature,
            first=turn * requests,
        )
        if self.shape is None:
            return plan
        return replace(plan, drafter=names[self.drafter], num_draft_tokens=self.shape.depth, widths=self.shape.widths)


@dataclass(frozen=True)
class ServedRun:
    """A setting's requests so far, and the lines that the services stated behind the last of them."""

    stats: tuple[GenerationStats, ...] = ()
    lines: Mapping[str, CostLine] = field(default_factory=dict)


ServedRuns = Mapping[GridSetting, ServedRun]


def settings_of(options: GridOptions, predictions: Predictions) -> Iterator[GridSetting]:
    """Yield all settings to serve: those that were predicted, and target-only for each kind, temperature and load."""
    for (kind, temperature), candidates in predictions.items():
        for load in options.plan.loads:
            yield GridSetting(kind, temperature, load)
            for drafter in candidates.positions:
                for shape in candidates.shapes_of(drafter):
                    yield GridSetting(kind, temperature, load, drafter, shape)


def serve_grid(
    options: GridOptions, services: GridServices, predictions: Predictions, advance: Advance
) -> Iterator[ServedRuns]:
    """Serve every setting in turns, each turn in an order of its own: the machine's other work meets all alike.

    Yields the runs so far, behind each turn.
    """
    names = drafter_names([name for name in next(iter(predictions.values())).positions if name != NGRAM])
    settings = list(settings_of(options, predictions))
    runs = {setting: ServedRun() for setting in settings}
    for turn in range(options.turns):
        random.Random(turn).shuffle(settings)  # noqa: S311 - an order, no secret
        for setting in settings:
            stats = services.serve(setting.plan(options, names, turn))
            runs[setting] = ServedRun((*runs[setting].stats, *stats), services.lines())
            shape = setting.shape.name if setting.shape else ""
            advance(f"{setting.kind} at {setting.temperature:g}, {setting.load} at once: {setting.drafter} {shape}")
        yield runs


def cells_of(runs: ServedRuns, predictions: Predictions, times: StepTimes) -> list[GridCell]:
    """Compare predictions with what was served; settings without a round behind the first have no cell."""
    cells = [
        _cell(setting, shape, runs, predictions[setting.kind, setting.temperature], times)
        for setting, run in runs.items()
        if (shape := setting.shape) is not None and any(len(each.records) > 1 for each in run.stats)
    ]
    return [cell for cell in cells if cell.rounds.rounds and cell.rounds.ms_per_token and cell.plain.ms_per_token]


def _cell(
    setting: GridSetting, shape: ProposalShape, runs: ServedRuns, candidates: Candidates, times: StepTimes
) -> GridCell:
    run, plain = runs[setting], runs[setting.plain]
    rounds = candidates.rounds_of(setting.drafter, shape)

    def ms_per_token(by: StepTimes) -> float:
        return just_in_time(by, setting.drafter, rounds, setting.load).ms_per_token

    return GridCell(
        kind=setting.kind,
        temperature=setting.temperature,
        drafter=setting.drafter,
        setting=shape.name,
        load=setting.load,
        predicted_tokens=rounds.tokens,
        predicted_error=rounds.error,
        predicted_ms=ms_per_token(times),
        stated_ms=ms_per_token(stated_times(times, run.lines)),
        own_ms=ms_per_token(own_times(times, setting.drafter, run.stats)),
        plain_ms=target_only(times, setting.load).ms_per_token,
        rounds=ServedRounds.of(run.stats),
        plain=ServedRounds.of(plain.stats),
    )


def own_times(times: StepTimes, drafter: str, stats: Sequence[GenerationStats]) -> StepTimes:
    """Return the times with what these very requests' rounds took: then only the formula can be wrong."""
    measurement = measured_setting(stats, {})
    draft = {drafter: measurement.draft} if measurement.draft.is_known else {}
    return replace(
        times,
        target=measurement.alone,
        drafts={**times.drafts, **draft},
        target_trip_ms=2 * measurement.target_one_way_ms + measurement.coordinator_ms,
        draft_trip_ms=2 * measurement.draft_one_way_ms,
    )


def stated_times(times: StepTimes, lines: Mapping[str, CostLine]) -> StepTimes:
    """Return the times with the lines that services stated; the draft's line is of the drafter that served last."""
    target = lines.get("alone", times.target)
    drafts = {name: lines.get("draft", line) for name, line in times.drafts.items()}
    return replace(times, target=target, drafts=drafts)
