"""A plan from start to end: the sample is answered and read, rounds are replayed, settings are compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from paceline.protocol.errors import require
from paceline_lab.plan.options import PlanOptions, TimesOptions
from paceline_lab.plan.readers import LoadedReaders, open_readers
from paceline_lab.plan.times import step_times
from paceline_lab.plan.traces import is_trace, traced_candidates, traced_times
from paceline_lab.predict.cycle import StepTimes
from paceline_lab.predict.positions import TextPositions
from paceline_lab.predict.positions_cache import PositionsCache
from paceline_lab.predict.reading import read_texts, shown_name
from paceline_lab.predict.rounds import positions_of
from paceline_lab.predict.sample import SampleOptions, read_sample, texts_at
from paceline_lab.predict.verdict import Candidates, PlanVerdict, TurningPoints, turning_points, verdict_of
from paceline_lab.reporting.progress import Advance, progress_bar
from paceline_lab.simulate.trace import read_trace
from paceline_training.user_data import UserData

ANSWER_BAR = "the target answers"
READ_BAR = "texts are read"


@dataclass(frozen=True, eq=False)
class PlanResult:
    """The result of a plan.

    Attributes:
        candidates: candidates by temperature.
        verdicts: verdicts by temperature, then by load.
        turns: turning points by temperature, at the first load.
        texts: positions of all texts at all temperatures; a trace has none.
        feature_drafters: drafters of running services that read the target's features, and so were left out.
    """

    options: PlanOptions
    times: StepTimes
    candidates: Mapping[float, Candidates]
    verdicts: Mapping[float, Mapping[int, PlanVerdict]]
    turns: Mapping[float, TurningPoints]
    texts: Sequence[TextPositions] = ()
    feature_drafters: tuple[str, ...] = ()

    @property
    def drafters(self) -> tuple[str, ...]:
        """Return the drafters' names, matches first."""
        return tuple(next(iter(self.candidates.values())).positions)


def make_plan(options: PlanOptions, console: Console) -> PlanResult:
    """Load models, answer prompts, read texts, replay rounds; a trace needs the replay alone.

    Raises:
        PacelineError: an option or a file of the user's can't be used; long work done so far stays in the folder.
    """
    if is_trace(options.sample.file):
        return plan_of_trace(options)
    with open_readers(options) as readers:
        times = step_times(options, readers)
        texts = read_all(options, readers, console)
    candidates = {
        temperature: Candidates(
            {name: positions_of(texts, name, temperature) for name in texts[0].drafters}, options.shapes
        )
        for temperature in options.sample.temperatures
    }
    return compare_settings(options, candidates, times, texts, readers.feature_drafters)


def plan_of_trace(options: PlanOptions) -> PlanResult:
    """Replay a trace of running services, with the times that they had.

    Raises:
        InvalidInput: a damaged trace, or options that only passes have.
    """
    limit = "left out with a trace, which has its drafter, texts and times"
    require(not options.drafters, "drafter", options.drafters, limit)
    require(options.services is None, "target_url", "given", limit)
    for name, default in vars(SampleOptions(options.sample.file)).items():
        option = getattr(options.sample, name)
        require(option == default, name.removesuffix("s") if name == "temperatures" else name, option, limit)
    apart = options.times.apart
    require(options.times == TimesOptions(apart=apart), "times", "stated or modelled", limit)
    trace = read_trace(options.sample.file)
    drafter = shown_name(trace.setting.notes.get("drafter", "draft"))
    temperature = float(trace.setting.notes.get("temperature", 0.0))
    candidates = {temperature: traced_candidates(trace, drafter, options.shapes)}
    return compare_settings(options, candidates, traced_times(trace.setting, drafter, apart=apart))


def read_all(options: PlanOptions, readers: LoadedReaders, console: Console) -> list[TextPositions]:
    """Read the sample at every temperature; positions in the cache are not read again."""
    data = read_sample(options.sample, readers.tokenizer, readers.passes.max_length)
    cache = PositionsCache(options.work / readers.passes.folder, sample_facts(options, readers, data))
    positions: list[TextPositions] = []
    for temperature in options.sample.temperatures:
        most = max(1, len(data.prompts) * (options.sample.answer_tokens + 1))  # each end is reported, too
        with progress_bar(console, ANSWER_BAR, most) as advance:
            report = _TotalsBar(advance, f"{ANSWER_BAR} at temperature {temperature:g}")
            texts = texts_at(
                options.sample, temperature, data, readers.passes, readers.tokenizer, options.work, report
            )
            report(most)  # of answers that ended early, or were there
        limit = f"1 or more with a token of an answer, at temperature {temperature:g}"
        require(bool(texts), "sample texts", len(texts), limit)
        with progress_bar(console, READ_BAR, len(texts)) as advance:
            positions += read_texts(readers.passes, texts, cache, advance)
    return positions


def sample_facts(options: PlanOptions, readers: LoadedReaders, data: UserData) -> dict[str, object]:
    """Return the facts on which all positions in the cache depend."""
    rows = [row.token_ids.tolist() + row.roles.tolist() for row in data.rows]
    digest = hashlib.sha256(json.dumps([data.prompts, rows]).encode()).hexdigest()
    fingerprint = readers.passes.fingerprint
    return {
        "target": fingerprint.model,
        "numeric": fingerprint.numeric,
        "sample": digest,
        "answer_tokens": options.sample.answer_tokens,
        "seed": options.sample.seed,
    }


def compare_settings(
    options: PlanOptions,
    candidates: Mapping[float, Candidates],
    times: StepTimes,
    texts: Sequence[TextPositions] = (),
    feature_drafters: tuple[str, ...] = (),
) -> PlanResult:
    """Compare every setting at every temperature and load."""
    verdicts = {
        temperature: {load: verdict_of(each, times, load) for load in options.loads}
        for temperature, each in candidates.items()
    }
    turns = {temperature: turning_points(each, times, options.loads[0]) for temperature, each in candidates.items()}
    return PlanResult(options, times, candidates, verdicts, turns, texts, feature_drafters)


class _TotalsBar:
    """Moves a bar that counts one by one to totals."""

    def __init__(self, advance: Advance, what: str) -> None:
        self._advance, self._what, self._done = advance, what, 0

    def __call__(self, total: int) -> None:
        for _ in range(self._done, total):
            self._advance(self._what)
        self._done = max(self._done, total)
