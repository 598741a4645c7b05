"""Options of `paceline plan`, checked before a model is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from paceline.costs.cost_line import CostLine
from paceline.local.drafter_choice import DrafterChoice
from paceline.protocol.errors import InvalidInput, require
from paceline.protocol.proposal import AUTO, MODEL, NGRAM
from paceline.runtime.config import EngineSettings
from paceline_lab.predict.cycle import LOCAL_TRIP_MS
from paceline_lab.predict.prices import Prices
from paceline_lab.predict.reading import shown_name
from paceline_lab.predict.rounds import ProposalShape
from paceline_lab.predict.sample import SampleOptions
from paceline_lab.predict.services import ServicesOptions

WORK_FOLDER = "work"
MOST_LOAD = 1 << 16
WEIGHTS = "bf16"
CONTEXT = 1024


class Origin(StrEnum):
    """Origins of step times that are not modelled."""

    MEASURED = "measured here"
    SERVICES = "as the running services say"
    STATED = "stated"
    RECORDED = "as the recorded services stated or took"


@dataclass(frozen=True)
class TimesOptions:
    """Options of step times: they are measured here unless they are stated as lines or modelled for a GPU.

    Attributes:
        target_line: the target's line as stated; no points: it is not stated.
        draft_lines: stated lines by drafter; the empty name is every other drafter's.
        gpu, draft_gpu: GPUs to model; empty: none. With a GPU of its own a draft is apart.
        tensor_parallel, weights: GPUs that share the target, and its number format; drafts are on one GPU in 16 bits.
        target_size, draft_size: a known size, or a `config.json`, to model in place of the models that were read.
        context: tokens of each session, whose keys and values a modelled step reads.
        target_trip_ms, draft_trip_ms: time there and back.
        apart: whether drafts have hardware of their own.
    """

    target_line: CostLine = field(default_factory=CostLine)
    draft_lines: Mapping[str, CostLine] = field(default_factory=dict)
    gpu: str = ""
    draft_gpu: str = ""
    tensor_parallel: int = 1
    weights: str = WEIGHTS
    target_size: str = ""
    draft_size: str = ""
    context: int = CONTEXT
    target_trip_ms: float = LOCAL_TRIP_MS
    draft_trip_ms: float = LOCAL_TRIP_MS
    apart: bool = False

    def __post_init__(self) -> None:
        conflict = self.target_line.is_known and self.gpu
        require(not conflict, "target_line", self.target_line.points, "left out with --gpu, which models it")
        require(bool(self.gpu) or not self.target_size, "target_size", self.target_size, "left out without --gpu")
        require(
            bool(self.draft_gpu) or not self.draft_size, "draft_size", self.draft_size, "left out without --draft-gpu"
        )
        for name, value, default in (("tp", self.tensor_parallel, 1), ("weights", self.weights, WEIGHTS)):
            require(bool(self.gpu) or value == default, name, value, "left out without --gpu")
        has_gpu = bool(self.gpu or self.draft_gpu) or self.context == CONTEXT
        require(has_gpu, "context", self.context, "left out without --gpu or --draft-gpu")
        require(0 <= self.context <= 1 << 24, "context", self.context, f"in [0, {1 << 24}]")

    def check_drafters(self, names: Sequence[str]) -> None:
        """Refuse a stated line of a drafter that isn't there.

        Raises:
            InvalidInput: it names the line's drafter, and those that are there.
        """
        limit = f"one of: {', '.join(names)}" if names else "left out without a drafter"
        for name in self.draft_lines:
            require(not name or name in names, "draft_line", name, limit)
        others = any(name not in self.draft_lines for name in names)
        idle = "" in self.draft_lines and not others
        require(not idle, "draft_line", "", "left out, or NAME=ROWS:MS: every drafter has a line of its own")

    def stated_line(self, drafter: str) -> CostLine | None:
        """Return a drafter's line as stated; None: it is not stated."""
        return self.draft_lines.get(drafter, self.draft_lines.get(""))


@dataclass(frozen=True)
class PlanOptions:
    """All options of a plan.

    Attributes:
        drafters: models of `paceline serve --drafter model:NAME`; matches are always compared.
        out: folder of the report, with the passes' work beside it.
        loads: requests at once, of one target.
        resume: whether to go on with earlier work in the folder.
        services: the services that read the sample, with their drafters; None: this machine reads it.
    """

    target: str
    sample: SampleOptions
    out: Path
    drafters: tuple[str, ...] = ()
    shapes: tuple[ProposalShape, ...] = (ProposalShape(1),)
    loads: tuple[int, ...] = (1,)
    times: TimesOptions = field(default_factory=TimesOptions)
    prices: Prices = field(default_factory=Prices)
    resume: bool = False
    engine: EngineSettings = field(default_factory=EngineSettings)
    services: ServicesOptions | None = None

    def __post_init__(self) -> None:
        require(any(shape.depth for shape in self.shapes), "k", [each.name for each in self.shapes], "one above 0")
        require(bool(self.loads), "sessions", self.loads, "one or more")
        for load in self.loads:
            require(1 <= load <= MOST_LOAD, "sessions", load, f"in [1, {MOST_LOAD}]")
        require(len(set(self.drafters)) == len(self.drafters), "drafter", self.drafters, "each named once")
        if self.services is None:
            self.times.check_drafters([shown_name(each) for each in self.drafters])
        has_work = self.work.exists() and any(self.work.iterdir())
        limit = "a folder without earlier work, or --resume to go on from it"
        require(self.resume or not has_work, "out", str(self.out), limit)

    @property
    def work(self) -> Path:
        """Return the folder of answers and positions."""
        return self.out / WORK_FOLDER


def drafters_named(names: list[str], target: str) -> tuple[str, ...]:
    """Return the models that `--drafter` names; without names, those that `auto` would serve.

    Raises:
        InvalidInput: a kind that is no draft model.
    """
    models: list[str] = []
    for name in names or [AUTO]:
        kind, colon, rest = name.partition(":")
        if colon and kind != MODEL and kind in (AUTO, NGRAM):
            raise InvalidInput.of("drafter", name, "NAME, model:NAME, mtp or ngram")
        if name == AUTO:
            models += DrafterChoice(AUTO).draft_models(target)
        elif name != NGRAM:
            models.append(rest if kind == MODEL and colon else name)
    return tuple(models)
