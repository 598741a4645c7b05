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
from paceline_lab.plan.readers import load_readers
from paceline_lab.plan.run import sample_facts
from paceline_lab.plan.times import step_times
from paceline_lab.plan.wanted import PlanWanted
from paceline_lab.predict.cycle import StepTimes, just_in_time, target_only
from paceline_lab.predict.kept import KeptPositions
from paceline_lab.predict.reading import read_texts
from paceline_lab.predict.rounds import ProposalShape, positions_of
from paceline_lab.predict.sample import texts_at
from paceline_lab.predict.verdict import Candidates
from paceline_lab.simulate.measured import measured_setting
from paceline_training.user_data import UserData

Advance = Callable[[str], None]


@dataclass(frozen=True)
class GridWanted:
    """What the grid is made of; the sample's file names nothing here, prompts come from the benchmarks.

    Attributes:
        plan: target, drafters, temperatures, shapes, loads, and the settings of the passes.
        prompts: by kind.
        requests: of each cell.
        tokens: most of each answer.
        turns: in which each cell's requests are served, all cells in each.
        repeats: draws of each prompt that prediction reads at temperatures above 0; with seeds of their own.
    """

    plan: PlanWanted
    prompts: Mapping[str, Sequence[Prompt]]
    requests: int
    tokens: int
    repeats: int = 2
    turns: int = 2

    @property
    def shapes(self) -> list[ProposalShape]:
        """Those that propose something."""
        return [shape for shape in self.plan.shapes if shape.depth]


Predictions = Mapping[tuple[str, float], Candidates]
"""By kind and temperature."""


def predict_grid(wanted: GridWanted, advance: Advance) -> tuple[Predictions, StepTimes]:
    """Both passes over every kind, and the steps' times; all models are gone again when it returns."""
    readers = load_readers(wanted.plan)
    times = step_times(wanted.plan, readers)
    found: dict[tuple[str, float], Candidates] = {}
    for kind, prompts in wanted.prompts.items():
        for temperature in wanted.plan.sample.temperatures:
            data = _prompts_of(prompts, readers.tokenizer, wanted.repeats if temperature > 0 else 1)
            folder = wanted.plan.work / kind / f"{temperature:g}"
            kept = KeptPositions(folder / "positions", sample_facts(wanted.plan, readers, data))
            texts = texts_at(wanted.plan.sample, temperature, data, readers.passes, readers.tokenizer, folder)
            read = read_texts(readers.passes, texts, kept)
            names = (NGRAM, *readers.models)
            positions = {name: positions_of(read, name, temperature) for name in names}
            found[kind, temperature] = Candidates(positions, wanted.plan.shapes)
            advance(f"{kind} at temperature {temperature:g} is read")
    del readers
    gc.collect()
    return found, times


def _prompts_of(prompts: Sequence[Prompt], tokenizer: Tokenizer, repeats: int) -> UserData:
    """The prompts as the services render them, each so many times: a draw of its own each time."""
    return UserData((), tuple(tokenizer.render_chat(prompt.chats[0]) for prompt in prompts) * repeats)


@dataclass(frozen=True)
class GridSetting:
    """What is served in turn: a drafter's shape, or target-only."""

    kind: str
    temperature: float
    load: int
    drafter: str = NONE
    shape: ProposalShape | None = None

    @property
    def plain(self) -> GridSetting:
        """Its target-only twin."""
        return GridSetting(self.kind, self.temperature, self.load)

    def plan(self, wanted: GridWanted, names: Mapping[str, str], turn: int) -> FixedPlan:
        """Its requests of one turn: other prompts and seeds in each."""
        requests = max(self.load, math.ceil(wanted.requests / wanted.turns))
        plan = FixedPlan(
            wanted.prompts[self.kind],
            requests=requests,
            sessions=self.load,
            tokens=wanted.tokens,
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


Served = Mapping[GridSetting, ServedRun]


def settings_of(wanted: GridWanted, predictions: Predictions) -> Iterator[GridSetting]:
    """All that are served: whatever was predicted, and target-only beside each kind, temperature and load."""
    for (kind, temperature), candidates in predictions.items():
        for load in wanted.plan.loads:
            yield GridSetting(kind, temperature, load)
            for drafter in candidates.positions:
                for shape in candidates.shapes_of(drafter):
                    yield GridSetting(kind, temperature, load, drafter, shape)


def serve_grid(
    wanted: GridWanted, services: GridServices, predictions: Predictions, advance: Advance
) -> Iterator[Served]:
    """Every setting in turns, each turn in an order of its own: what the machine does meanwhile meets all alike.

    Yields what was served so far, behind each turn.
    """
    names = drafter_names([name for name in next(iter(predictions.values())).positions if name != NGRAM])
    settings = list(settings_of(wanted, predictions))
    found = {setting: ServedRun() for setting in settings}
    for turn in range(wanted.turns):
        random.Random(turn).shuffle(settings)  # noqa: S311 - an order, no secret
        for setting in settings:
            stats = services.serve(setting.plan(wanted, names, turn))
            found[setting] = ServedRun((*found[setting].stats, *stats), services.lines())
            shape = setting.shape.name if setting.shape else ""
            advance(f"{setting.kind} at {setting.temperature:g}, {setting.load} at once: {setting.drafter} {shape}")
        yield found


def cells_of(served: Served, predictions: Predictions, times: StepTimes) -> list[GridCell]:
    """Predicted beside served; settings without a round behind the first are left out."""
    cells = [
        _cell(setting, shape, served, predictions[setting.kind, setting.temperature], times)
        for setting, run in served.items()
        if (shape := setting.shape) is not None and any(len(each.records) > 1 for each in run.stats)
    ]
    return [cell for cell in cells if cell.served.rounds and cell.served.ms_per_token and cell.plain.ms_per_token]


def _cell(
    setting: GridSetting, shape: ProposalShape, served: Served, candidates: Candidates, times: StepTimes
) -> GridCell:
    run, plain = served[setting], served[setting.plain]
    expected = candidates.expected(setting.drafter, shape)

    def ms_per_token(by: StepTimes) -> float:
        return just_in_time(by, setting.drafter, expected, setting.load).ms_per_token

    return GridCell(
        kind=setting.kind,
        temperature=setting.temperature,
        drafter=setting.drafter,
        setting=shape.name,
        load=setting.load,
        predicted_tokens=expected.tokens,
        predicted_error=expected.error,
        predicted_ms=ms_per_token(times),
        stated_ms=ms_per_token(stated_times(times, run.lines)),
        own_ms=ms_per_token(own_times(times, setting.drafter, run.stats)),
        plain_ms=target_only(times, setting.load).ms_per_token,
        served=ServedRounds.of(run.stats),
        plain=ServedRounds.of(plain.stats),
    )


def own_times(times: StepTimes, drafter: str, stats: Sequence[GenerationStats]) -> StepTimes:
    """The same with what these very requests' rounds took: then the formula alone is left to be wrong."""
    found = measured_setting(stats, {})
    draft = {drafter: found.draft} if found.draft.is_known else {}
    return replace(
        times,
        target=found.alone,
        drafts={**times.drafts, **draft},
        target_trip_ms=2 * found.target_one_way_ms + found.coordinator_ms,
        draft_trip_ms=2 * found.draft_one_way_ms,
    )


def stated_times(times: StepTimes, lines: Mapping[str, CostLine]) -> StepTimes:
    """The same with the lines that services stated; the draft's is of the drafter that was asked last."""
    target = lines.get("alone", times.target)
    drafts = {name: lines.get("draft", line) for name, line in times.drafts.items()}
    return replace(times, target=target, drafts=drafts)
