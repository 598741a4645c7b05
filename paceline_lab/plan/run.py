"""A plan from start to end: the sample is answered and read, rounds are replayed, settings are compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from paceline.protocol.errors import require
from paceline_lab.plan.readers import LoadedReaders, opened_readers
from paceline_lab.plan.times import step_times
from paceline_lab.plan.traced import is_trace, traced_candidates, traced_times
from paceline_lab.plan.wanted import PlanWanted, TimesWanted
from paceline_lab.predict.cycle import StepTimes
from paceline_lab.predict.kept import KeptPositions
from paceline_lab.predict.positions import TextPositions
from paceline_lab.predict.reading import read_texts, shown_name
from paceline_lab.predict.rounds import positions_of
from paceline_lab.predict.sample import SampleWanted, read_sample, texts_at
from paceline_lab.predict.verdict import Candidates, PlanVerdict, TurningPoints, turning_points, verdict_of
from paceline_lab.reporting.progress import Advance, progress_bar
from paceline_lab.simulate.trace import read_trace
from paceline_training.user_data import UserData

ANSWER_BAR = "the target answers"
READ_BAR = "texts are read"


@dataclass(frozen=True, eq=False)
class PlanResult:
    """What came of a plan.

    Attributes:
        candidates: by temperature.
        verdicts, turns: by temperature, then by load.
        texts: read, at all temperatures; none of a trace.
        left_out: drafters of running services that they can't be asked about.
    """

    wanted: PlanWanted
    times: StepTimes
    candidates: Mapping[float, Candidates]
    verdicts: Mapping[float, Mapping[int, PlanVerdict]]
    turns: Mapping[float, TurningPoints]
    texts: Sequence[TextPositions] = ()
    left_out: tuple[str, ...] = ()

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names, matches first."""
        return tuple(next(iter(self.candidates.values())).positions)


def make_plan(wanted: PlanWanted, console: Console) -> PlanResult:
    """Load, answer, read, replay; a trace is replayed alone.

    Raises:
        PacelineError: whatever the user gave that can't be; long work done so far is kept.
    """
    if is_trace(wanted.sample.file):
        return plan_of_trace(wanted)
    with opened_readers(wanted) as readers:
        times = step_times(wanted, readers)
        texts = read_all(wanted, readers, console)
    candidates = {
        temperature: Candidates(
            {name: positions_of(texts, name, temperature) for name in texts[0].drafters}, wanted.shapes
        )
        for temperature in wanted.sample.temperatures
    }
    return compared(wanted, candidates, times, texts, readers.left_out)


def plan_of_trace(wanted: PlanWanted) -> PlanResult:
    """Replay what running services recorded, with the times that they had.

    Raises:
        InvalidInput: a damaged trace, or options that only passes have.
    """
    limit = "left out with a trace, which has its drafter, texts and times"
    require(not wanted.drafters, "drafter", wanted.drafters, limit)
    require(wanted.services is None, "target_url", "given", limit)
    for name, default in vars(SampleWanted(wanted.sample.file)).items():
        given = getattr(wanted.sample, name)
        require(given == default, name.removesuffix("s") if name == "temperatures" else name, given, limit)
    apart = wanted.times.apart
    require(wanted.times == TimesWanted(apart=apart), "times", "stated or modelled", limit)
    trace = read_trace(wanted.sample.file)
    drafter = shown_name(trace.setting.notes.get("drafter", "draft"))
    temperature = float(trace.setting.notes.get("temperature", 0.0))
    candidates = {temperature: traced_candidates(trace, drafter, wanted.shapes)}
    return compared(wanted, candidates, traced_times(trace.setting, drafter, apart=apart))


def read_all(wanted: PlanWanted, readers: LoadedReaders, console: Console) -> list[TextPositions]:
    """The sample at every temperature, as far as it is not kept already."""
    data = read_sample(wanted.sample, readers.tokenizer, readers.passes.max_length)
    kept = KeptPositions(wanted.work / readers.passes.folder, sample_facts(wanted, readers, data))
    found: list[TextPositions] = []
    for temperature in wanted.sample.temperatures:
        most = max(1, len(data.prompts) * (wanted.sample.answer_tokens + 1))  # each end is told, too
        with progress_bar(console, ANSWER_BAR, most) as advance:
            report = _TotalsBar(advance, f"{ANSWER_BAR} at temperature {temperature:g}")
            texts = texts_at(wanted.sample, temperature, data, readers.passes, readers.tokenizer, wanted.work, report)
            report(most)  # of answers that ended early, or were there
        limit = f"1 or more with a token of an answer, at temperature {temperature:g}"
        require(bool(texts), "sample texts", len(texts), limit)
        with progress_bar(console, READ_BAR, len(texts)) as advance:
            found += read_texts(readers.passes, texts, kept, advance)
    return found


def sample_facts(wanted: PlanWanted, readers: LoadedReaders, data: UserData) -> dict[str, object]:
    """What all kept positions depend on."""
    rows = [row.token_ids.tolist() + row.roles.tolist() for row in data.rows]
    digest = hashlib.sha256(json.dumps([data.prompts, rows]).encode()).hexdigest()
    fingerprint = readers.passes.fingerprint
    return {
        "target": fingerprint.model,
        "numeric": fingerprint.numeric,
        "sample": digest,
        "answer_tokens": wanted.sample.answer_tokens,
        "seed": wanted.sample.seed,
    }


def compared(
    wanted: PlanWanted,
    candidates: Mapping[float, Candidates],
    times: StepTimes,
    texts: Sequence[TextPositions] = (),
    left_out: tuple[str, ...] = (),
) -> PlanResult:
    """Every setting at every temperature and load."""
    verdicts = {
        temperature: {load: verdict_of(found, times, load) for load in wanted.loads}
        for temperature, found in candidates.items()
    }
    turns = {temperature: turning_points(found, times, wanted.loads[0]) for temperature, found in candidates.items()}
    return PlanResult(wanted, times, candidates, verdicts, turns, texts, left_out)


class _TotalsBar:
    """Moves a bar that counts one by one to totals."""

    def __init__(self, advance: Advance, what: str) -> None:
        self._advance, self._what, self._done = advance, what, 0

    def __call__(self, total: int) -> None:
        for _ in range(self._done, total):
            self._advance(self._what)
        self._done = max(self._done, total)
