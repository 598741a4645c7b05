"""Step times of a plan: measured here, stated, or modelled, each marked with what it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.costs.cost_line import CostLine
from paceline.models.resolve import resolve, resolve_draft
from paceline.protocol.errors import require
from paceline.protocol.given_files import read_json
from paceline_lab.plan.readers import LoadedReaders
from paceline_lab.plan.wanted import PlanWanted, TimesWanted
from paceline_lab.predict.cycle import StepTimes
from paceline_lab.predict.published import SIZES
from paceline_lab.predict.roofline import ModelPlace, ModelSize

STATED = "stated"
TARGET_STEP = "target step"


def step_times(wanted: PlanWanted, readers: LoadedReaders) -> StepTimes:
    """All lines of a plan.

    Raises:
        InvalidInput: a size that is not known, or a model that its GPUs can't hold.
        Unsupported: a model whose steps are not modelled.
    """
    asked = wanted.times
    target = _target(wanted, readers)
    drafts = {name: _draft(wanted, model, name, readers) for name, model in readers.models.items()}
    return StepTimes(
        target.line,
        {name: step.line for name, step in drafts.items()},
        target.session_ms,
        {name: step.session_ms for name, step in drafts.items()},
        asked.target_trip_ms,
        asked.draft_trip_ms,
        apart=asked.apart or bool(asked.draft_gpu),
        origins={TARGET_STEP: target.origin} | {f"{name} step": step.origin for name, step in drafts.items()},
    )


@dataclass(frozen=True)
class _SourcedStep:
    """A step by its rows, what each session adds beside them, and where that is from."""

    line: CostLine
    origin: str
    session_ms: float = 0.0

    @classmethod
    def modelled(cls, place: ModelPlace, size: str, asked: TimesWanted) -> _SourcedStep:
        """By roofline.

        Raises:
            InvalidInput: the GPUs can't hold the model.
        """
        place.check_fits()
        return cls(place.line(), _modelled(place, size, asked), place.kv_ms(asked.context))


def _target(wanted: PlanWanted, readers: LoadedReaders) -> _SourcedStep:
    asked = wanted.times
    if asked.target_line.is_known:
        return _SourcedStep(asked.target_line, STATED)
    if not asked.gpu:
        return _SourcedStep(readers.target_line, readers.origin)
    size = size_named("target_size", asked.target_size or wanted.target)
    place = ModelPlace(size, asked.gpu, asked.tensor_parallel, asked.weights)
    return _SourcedStep.modelled(place, asked.target_size, asked)


def _draft(wanted: PlanWanted, model: str, name: str, readers: LoadedReaders) -> _SourcedStep:
    asked = wanted.times
    stated = asked.stated_line(name)
    if stated is not None:
        return _SourcedStep(stated, STATED)
    if not asked.draft_gpu:
        return _SourcedStep(readers.draft_lines[name], readers.origin)
    size = size_named("draft_size", asked.draft_size or resolve_draft(model, wanted.target))
    return _SourcedStep.modelled(ModelPlace(size, asked.draft_gpu), asked.draft_size, asked)


def _modelled(place: ModelPlace, size: str, asked: TimesWanted) -> str:
    of = f" of {Path(size).name}'s size" if size else ""
    gpus = f"{place.tensor_parallel} {place.gpu}" if place.tensor_parallel > 1 else place.gpu
    return f"MODELLED by roofline for {gpus}, {place.weights}{of}, {asked.context} tokens of context; not measured"


def size_named(field: str, name: str) -> ModelSize:
    """A known size, a `config.json`, or a model's own.

    Raises:
        InvalidInput: none of them.
    """
    if name in SIZES:
        return SIZES[name]
    file = Path(name).expanduser()
    if not file.is_file():
        found = resolve(name)
        file = Path(found.location) / "config.json" if found.kind == "folder" else file
    known = file.is_file()
    require(known, field, name, f"one of {', '.join(SIZES)}, a config.json, or a model with one")
    return ModelSize.of_config(read_json(field, file))
