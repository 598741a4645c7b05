"""Step times of a plan: measured here, stated, or modelled, each marked with what it is."""

from __future__ import annotations

from pathlib import Path

from benchmarks.planning.readers import LoadedReaders
from benchmarks.planning.wanted import PlanWanted, TimesWanted
from paceline.costs.cost_line import CostLine
from paceline.models.resolve import resolve, resolve_draft
from paceline.predict.cycle import StepTimes
from paceline.predict.published import SIZES
from paceline.predict.roofline import ModelPlace, ModelSize
from paceline.protocol.errors import require
from paceline.protocol.given_files import read_json

STATED = "stated"
TARGET_STEP = "target step"


def step_times(wanted: PlanWanted, readers: LoadedReaders) -> StepTimes:
    """All lines of a plan.

    Raises:
        InvalidInput: a size that is not known, or a model that its GPUs can't hold.
        Unsupported: a model whose steps are not modelled.
    """
    asked = wanted.times
    target, session_ms, origin = _target(wanted, readers)
    origins = {TARGET_STEP: origin}
    drafts: dict[str, CostLine] = {}
    for name, model in readers.models.items():
        drafts[name], origins[f"{name} step"] = _draft(wanted, model, name, readers)
    return StepTimes(
        target,
        drafts,
        session_ms,
        asked.target_trip_ms,
        asked.draft_trip_ms,
        apart=asked.apart or bool(asked.draft_gpu),
        origins=origins,
    )


def _target(wanted: PlanWanted, readers: LoadedReaders) -> tuple[CostLine, float, str]:
    """Line, milliseconds of a session beside its rows, and origin."""
    asked = wanted.times
    if asked.target_line.is_known:
        return asked.target_line, 0.0, STATED
    if not asked.gpu:
        return readers.target_line, 0.0, readers.origin
    size = size_named("target_size", asked.target_size or wanted.target)
    place = ModelPlace(size, asked.gpu, asked.tensor_parallel, asked.weights)
    place.check_fits()
    return _without_context(place), place.kv_ms(asked.context), _modelled(place, asked.target_size, asked)


def _draft(wanted: PlanWanted, model: str, name: str, readers: LoadedReaders) -> tuple[CostLine, str]:
    asked = wanted.times
    stated = asked.stated_line(name)
    if stated is not None:
        return stated, STATED
    if not asked.draft_gpu:
        return readers.draft_lines[name], readers.origin
    size = size_named("draft_size", asked.draft_size or resolve_draft(model, wanted.target))
    place = ModelPlace(size, asked.draft_gpu)
    place.check_fits()
    return _without_context(place), _modelled(place, asked.draft_size, asked)


def _without_context(place: ModelPlace) -> CostLine:
    return place.line(0.0)


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
