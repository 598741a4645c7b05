"""The grid: passes and times first, with nothing served; then the same settings served."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.planning.readers import load_readers
from benchmarks.planning.run import sample_facts
from benchmarks.planning.times import step_times
from benchmarks.planning.wanted import PlanWanted
from benchmarks.predicted.cells import GridCell, ServedRounds
from benchmarks.predicted.serving import FixedPlan, GridServices, drafter_names
from benchmarks.prompts import Prompt
from benchmarks.simulator.measured import measured_setting
from paceline.costs.cost_line import CostLine
from paceline.models.tokenizer import Tokenizer
from paceline.predict.cycle import PredictedSpeed, StepTimes, just_in_time, target_only
from paceline.predict.kept import KeptPositions
from paceline.predict.reading import read_texts
from paceline.predict.rounds import ExpectedRounds, ProposalShape, positions_of
from paceline.predict.sample import texts_at
from paceline.predict.verdict import Candidates
from paceline.protocol.proposal import NGRAM, NONE
from paceline.protocol.records import GenerationStats
from paceline.train.user_data import UserData

Advance = Callable[[str], None]


@dataclass(frozen=True)
class GridWanted:
    """What the grid is made of; the sample's file names nothing here, prompts come from the benchmarks.

    Attributes:
        plan: target, drafters, temperatures, shapes, loads, and the settings of the passes.
        prompts: by kind.
        requests: of each cell.
        tokens: most of each answer.
        repeats: draws of each prompt that prediction reads at temperatures above 0; with seeds of their own.
    """

    plan: PlanWanted
    prompts: Mapping[str, Sequence[Prompt]]
    requests: int
    tokens: int
    repeats: int = 2

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
class ServedRun:
    """A setting's requests and their target-only twins, with the lines that the services stated then."""

    kind: str
    temperature: float
    load: int
    drafter: str
    shape: ProposalShape
    stats: Sequence[GenerationStats]
    plain: Sequence[GenerationStats]
    lines: Mapping[str, CostLine]


def serve_grid(
    wanted: GridWanted, services: GridServices, predictions: Predictions, advance: Advance
) -> Iterator[ServedRun]:
    """Every setting that was predicted, target-only before each kind, temperature and load."""
    names = drafter_names([name for name in next(iter(predictions.values())).positions if name != NGRAM])
    for (kind, temperature), candidates in predictions.items():
        base = FixedPlan(
            wanted.prompts[kind], requests=wanted.requests, tokens=wanted.tokens, temperature=temperature
        )
        for load in wanted.plan.loads:
            loaded = replace(base, sessions=load, requests=max(load, wanted.requests))
            plain = services.serve(replace(loaded, drafter=NONE))
            advance(f"{kind} at temperature {temperature:g}, {load} at once: target-only")
            for drafter, shape in _settings(candidates):
                plan = replace(loaded, drafter=names[drafter], num_draft_tokens=shape.depth, widths=shape.widths)
                stats = services.serve(plan)
                advance(f"{kind} at temperature {temperature:g}, {load} at once: {drafter} {shape.name}")
                yield ServedRun(kind, temperature, load, drafter, shape, stats, plain, services.lines())


def _settings(candidates: Candidates) -> Iterator[tuple[str, ProposalShape]]:
    for drafter in candidates.positions:
        for shape in candidates.shapes_of(drafter):
            yield drafter, shape


def cells_of(runs: Sequence[ServedRun], predictions: Predictions, times: StepTimes) -> list[GridCell]:
    """Predicted beside served; settings without a round behind the first are left out."""
    timed = [run for run in runs if any(len(each.records) > 1 for each in run.stats)]
    cells = [_cell(run, predictions[run.kind, run.temperature], times) for run in timed]
    return [cell for cell in cells if cell.served.rounds and cell.served.ms_per_token and cell.plain.ms_per_token]


def _cell(run: ServedRun, candidates: Candidates, times: StepTimes) -> GridCell:
    expected = candidates.expected(run.drafter, run.shape)
    stated = stated_times(times, run.lines)
    return GridCell(
        kind=run.kind,
        temperature=run.temperature,
        drafter=run.drafter,
        setting=run.shape.name,
        load=run.load,
        predicted_tokens=expected.tokens,
        predicted_error=expected.error,
        predicted_ms=_speed(times, run, expected).ms_per_token,
        stated_ms=_speed(stated, run, expected).ms_per_token,
        own_ms=_speed(own_times(times, run), run, expected).ms_per_token,
        plain_ms=target_only(times, run.load).ms_per_token,
        served=ServedRounds.of(run.stats),
        plain=ServedRounds.of(run.plain),
    )


def _speed(times: StepTimes, run: ServedRun, expected: ExpectedRounds) -> PredictedSpeed:
    return just_in_time(times, run.drafter, expected, run.load)


def own_times(times: StepTimes, run: ServedRun) -> StepTimes:
    """The same with what this very run's rounds took: then the formula alone is left to be wrong."""
    found = measured_setting(run.stats, {})
    draft = {run.drafter: found.draft} if found.draft.is_known else {}
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
