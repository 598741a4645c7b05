"""The engines that read the sample, and what their steps take here: both as the services have them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

from draft_service.drafters.catalogue import build_catalogue
from draft_service.drafters.interface import AnyDrafter
from draft_service.drafters.model import ModelDrafter
from paceline.costs.cost_line import CostLine
from paceline.engine.interface import Engine
from paceline.engine.loading import load_engine
from paceline.models.table_names import is_table
from paceline.models.tokenizer import Tokenizer, load_tokenizer
from paceline.protocol.errors import require
from paceline.protocol.proposal import MODEL, NGRAM
from paceline.runtime.config import DraftConfig
from paceline.sampling.racing import warm_up
from paceline_lab.plan.wanted import PlanWanted
from paceline_lab.predict.reading import EnginePasses, PassSource, shown_name
from paceline_lab.predict.services import ServicePasses

MEASURED = "measured here"
PASSES = 3
"""Measurements of each line: another program's burst falls into one of them."""
SAID = "as the running services say"
"""Origins of lines."""


@dataclass(frozen=True)
class LoadedReaders:
    """A target and its drafters, and the lines that their services state, or would.

    Attributes:
        models: what each drafter runs, by the names that reports use.
        target_line: no points where times are stated or modelled.
        origin: of the lines.
        left_out: drafters that were not read.
    """

    passes: PassSource
    tokenizer: Tokenizer
    models: Mapping[str, str]
    target_line: CostLine
    draft_lines: Mapping[str, CostLine]
    origin: str = MEASURED
    left_out: tuple[str, ...] = ()


@contextmanager
def opened_readers(wanted: PlanWanted) -> Iterator[LoadedReaders]:
    """Services that run, where the plan names any, else engines that are loaded here.

    Raises:
        PacelineError: as `load_readers` or `ServicePasses`.
        InvalidInput: a service that doesn't say what its steps take, and no line is stated in its place.
    """
    if wanted.services is None:
        yield load_readers(wanted)
        return
    tokenizer = load_tokenizer(wanted.target, trust_remote_code=wanted.engine.trust_remote_code)
    with ServicePasses(wanted.services, tokenizer) as passes:
        wanted.times.check_drafters([*passes.models])
        lines = passes.draft_lines
        for name, line in {"target": passes.target_line, **lines}.items():
            known = line.is_known or _otherwise_known(wanted, name)
            require(known, f"step times of {name}", "not said", "said by its service, or stated as a line")
        yield LoadedReaders(passes, tokenizer, passes.models, passes.target_line, lines, SAID, passes.left_out)


def _otherwise_known(wanted: PlanWanted, name: str) -> bool:
    asked = wanted.times
    if name == "target":
        return asked.target_line.is_known or bool(asked.gpu)
    return asked.stated_line(name) is not None or bool(asked.draft_gpu)


def load_readers(wanted: PlanWanted) -> LoadedReaders:
    """Load everything, and time the steps.

    Raises:
        InvalidInput: a model that isn't there, or a draft of another target.
        VocabularyMismatch: drafters whose vocabularies don't fit.
    """
    from target_service.meter import measure_engine

    if not is_table(wanted.target):
        from paceline.engine.weights import set_threads

        set_threads(wanted.engine.threads)
    warm_up()
    target = load_engine(wanted.target, wanted.engine)
    tokenizer = load_tokenizer(wanted.target, trust_remote_code=wanted.engine.trust_remote_code)
    names = [shown_name(each) for each in wanted.drafters]
    require(len({*names, NGRAM}) == len(names) + 1, "drafter", names, f"of different names, none of them {NGRAM}")
    drafters, lines = _drafters(wanted, names)
    models = dict(zip(names, wanted.drafters, strict=True))
    unmeasured = wanted.times.gpu or wanted.times.target_line.is_known
    line = CostLine() if unmeasured else least_line([measure_engine(target) for _ in range(PASSES)])
    return LoadedReaders(EnginePasses(target, drafters), tokenizer, models, line, lines)


def _drafters(wanted: PlanWanted, names: list[str]) -> tuple[dict[str, Engine], dict[str, CostLine]]:
    if not names:
        return {}, {}
    engine = wanted.engine.model_dump(include={"threads", "device", "trust_remote_code"})
    config = DraftConfig(
        drafters=tuple(f"{MODEL}:{each}" for each in wanted.drafters),
        target_model=wanted.target,
        engine=DraftConfig().engine.model_copy(update=engine),
    )
    catalogue = build_catalogue(config)
    lines = [_measured_again(drafter) for drafter in catalogue.drafters.values()]
    return dict(zip(names, catalogue.engines, strict=True)), dict(zip(names, lines, strict=True))


def _measured_again(drafter: AnyDrafter) -> CostLine:
    """The least of what a drafter measures when it is loaded and again."""
    lines = [drafter.line]
    if isinstance(drafter, ModelDrafter):
        for _ in range(PASSES - 1):
            drafter.measure()
            lines.append(drafter.line)
    return least_line(lines)


def least_line(lines: Sequence[CostLine]) -> CostLine:
    """Of several measurements of a line the least of each point: what others do on the machine only ever adds.

    A service has a second at start-up and learns from the steps that run. A plan has no steps that run.
    """
    found: dict[float, float] = {}
    for line in lines:
        for rows, ms in line.points:
            found[rows] = min(ms, found.get(rows, ms))
    times = accumulate((found[rows] for rows in sorted(found)), max)
    return CostLine(tuple(zip(sorted(found), times, strict=True)))
