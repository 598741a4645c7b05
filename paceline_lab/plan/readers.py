"""The engines that read the sample, and their step times here: both are as in services."""

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
from paceline_lab.plan.options import Origin, PlanOptions
from paceline_lab.predict.reading import EnginePasses, PassSource, shown_name
from paceline_lab.predict.services import ServicePasses

PASSES = 3
"""Measurements of each line: another program's burst falls into one of them."""


@dataclass(frozen=True)
class LoadedReaders:
    """A target and its drafters, and the lines that their services state, or would.

    Attributes:
        models: the model that each drafter runs, by the names that reports use.
        target_line: the target's line; no points where times are stated or modelled.
        origin: origin of the lines.
        feature_drafters: drafters of services that read the target's features, and so were left out.
    """

    passes: PassSource
    tokenizer: Tokenizer
    models: Mapping[str, str]
    target_line: CostLine
    draft_lines: Mapping[str, CostLine]
    origin: Origin = Origin.MEASURED
    feature_drafters: tuple[str, ...] = ()


@contextmanager
def open_readers(options: PlanOptions) -> Iterator[LoadedReaders]:
    """Yield running services where the plan names any, else engines that are loaded here.

    Raises:
        PacelineError: as `load_readers` or `ServicePasses`.
        InvalidInput: a service doesn't state its step times, and the options have no line in their place.
    """
    if options.services is None:
        yield load_readers(options)
        return
    tokenizer = load_tokenizer(options.target, trust_remote_code=options.engine.trust_remote_code)
    with ServicePasses(options.services, tokenizer) as passes:
        options.times.check_drafters([*passes.models])
        lines = passes.draft_lines
        for name, line in {"target": passes.target_line, **lines}.items():
            has_line = line.is_known or _has_other_line(options, name)
            require(has_line, f"step times of {name}", "not said", "said by its service, or stated as a line")
        yield LoadedReaders(
            passes, tokenizer, passes.models, passes.target_line, lines, Origin.SERVICES, passes.feature_drafters
        )


def _has_other_line(options: PlanOptions, name: str) -> bool:
    times = options.times
    if name == "target":
        return times.target_line.is_known or bool(times.gpu)
    return times.stated_line(name) is not None or bool(times.draft_gpu)


def load_readers(options: PlanOptions) -> LoadedReaders:
    """Load everything, and time the steps.

    Raises:
        InvalidInput: a model that isn't there, or a draft of another target.
        VocabularyMismatch: drafters whose vocabularies don't fit.
    """
    from target_service.measuring import measure_engine

    if not is_table(options.target):
        from paceline.engine.weights import set_threads

        set_threads(options.engine.threads)
    warm_up()
    target = load_engine(options.target, options.engine)
    tokenizer = load_tokenizer(options.target, trust_remote_code=options.engine.trust_remote_code)
    names = [shown_name(each) for each in options.drafters]
    require(len({*names, NGRAM}) == len(names) + 1, "drafter", names, f"of different names, none of them {NGRAM}")
    drafters, lines = _drafters(options, names)
    models = dict(zip(names, options.drafters, strict=True))
    needs_no_line = options.times.gpu or options.times.target_line.is_known
    line = CostLine() if needs_no_line else least_line([measure_engine(target) for _ in range(PASSES)])
    return LoadedReaders(EnginePasses(target, drafters), tokenizer, models, line, lines)


def _drafters(options: PlanOptions, names: list[str]) -> tuple[dict[str, Engine], dict[str, CostLine]]:
    if not names:
        return {}, {}
    engine = options.engine.model_dump(include={"threads", "device", "trust_remote_code"})
    config = DraftConfig(
        drafters=tuple(f"{MODEL}:{each}" for each in options.drafters),
        target_model=options.target,
        engine=DraftConfig().engine.model_copy(update=engine),
    )
    catalogue = build_catalogue(config)
    lines = [_least_measurement(drafter) for drafter in catalogue.drafters.values()]
    return dict(zip(names, catalogue.engines, strict=True)), dict(zip(names, lines, strict=True))


def _least_measurement(drafter: AnyDrafter) -> CostLine:
    """Return the least of a drafter's measurements when it is loaded and again."""
    lines = [drafter.line]
    if isinstance(drafter, ModelDrafter):
        for _ in range(PASSES - 1):
            drafter.measure()
            lines.append(drafter.line)
    return least_line(lines)


def least_line(lines: Sequence[CostLine]) -> CostLine:
    """Return the least of each point over several measurements of a line: other work on the machine only ever adds.

    A service has a second at start-up, and learns from the steps that run. A plan has no steps that run.
    """
    least_ms: dict[float, float] = {}
    for line in lines:
        for rows, ms in line.points:
            least_ms[rows] = min(ms, least_ms.get(rows, ms))
    times = accumulate((least_ms[rows] for rows in sorted(least_ms)), max)
    return CostLine(tuple(zip(sorted(least_ms), times, strict=True)))
