"""Step times of a plan: measured here, stated, or modelled, each marked with its origin."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.costs.cost_line import CostLine
from paceline.models.resolve import resolve, resolve_draft
from paceline.protocol.errors import require
from paceline.protocol.given_files import read_json
from paceline_lab.plan.options import Origin, PlanOptions, TimesOptions
from paceline_lab.plan.readers import LoadedReaders
from paceline_lab.predict.cycle import StepTimes
from paceline_lab.predict.published import SIZES
from paceline_lab.predict.roofline import ModelPlacement, ModelSize

TARGET_STEP = "target step"


def step_times(options: PlanOptions, readers: LoadedReaders) -> StepTimes:
    """Return all step times of a plan.

    Raises:
        InvalidInput: a size is unknown, or a model is too large for its GPUs.
        Unsupported: a model's steps can't be modelled.
    """
    time_options = options.times
    target = _target(options, readers)
    drafts = {name: _draft(options, model, name, readers) for name, model in readers.models.items()}
    return StepTimes(
        target.line,
        {name: step.line for name, step in drafts.items()},
        target.session_ms,
        {name: step.session_ms for name, step in drafts.items()},
        time_options.target_trip_ms,
        time_options.draft_trip_ms,
        apart=time_options.apart or bool(time_options.draft_gpu),
        origins={TARGET_STEP: target.origin} | {f"{name} step": step.origin for name, step in drafts.items()},
    )


@dataclass(frozen=True)
class _StepCost:
    """The time of a step by its rows, the time that each session adds, and the origin of both."""

    line: CostLine
    origin: str
    session_ms: float = 0.0

    @classmethod
    def by_roofline(cls, placement: ModelPlacement, size: str, times: TimesOptions) -> _StepCost:
        """Model a step by roofline.

        Raises:
            InvalidInput: the GPUs can't hold the model.
        """
        placement.check_fits()
        return cls(placement.line(), _roofline_origin(placement, size, times), placement.kv_ms(times.context))


def _target(options: PlanOptions, readers: LoadedReaders) -> _StepCost:
    times = options.times
    if times.target_line.is_known:
        return _StepCost(times.target_line, Origin.STATED)
    if not times.gpu:
        return _StepCost(readers.target_line, readers.origin)
    size = size_named("target_size", times.target_size or options.target)
    placement = ModelPlacement(size, times.gpu, times.tensor_parallel, times.weights)
    return _StepCost.by_roofline(placement, times.target_size, times)


def _draft(options: PlanOptions, model: str, name: str, readers: LoadedReaders) -> _StepCost:
    times = options.times
    line = times.stated_line(name)
    if line is not None:
        return _StepCost(line, Origin.STATED)
    if not times.draft_gpu:
        return _StepCost(readers.draft_lines[name], readers.origin)
    size = size_named("draft_size", times.draft_size or resolve_draft(model, options.target))
    return _StepCost.by_roofline(ModelPlacement(size, times.draft_gpu), times.draft_size, times)


def _roofline_origin(placement: ModelPlacement, size: str, times: TimesOptions) -> str:
    of = f" of {Path(size).name}'s size" if size else ""
    gpus = f"{placement.tensor_parallel} {placement.gpu}" if placement.tensor_parallel > 1 else placement.gpu
    return (
        f"MODELLED by roofline for {gpus}, {placement.weights}{of}, {times.context} tokens of context; not measured"
    )


def size_named(field: str, name: str) -> ModelSize:
    """Return a known size, that of a `config.json`, or a model's own.

    Raises:
        InvalidInput: the name is none of them.
    """
    if name in SIZES:
        return SIZES[name]
    file = Path(name).expanduser()
    if not file.is_file():
        source = resolve(name)
        file = Path(source.location) / "config.json" if source.kind == "folder" else file
    is_file = file.is_file()
    require(is_file, field, name, f"one of {', '.join(SIZES)}, a config.json, or a model with one")
    return ModelSize.of_config(read_json(field, file))
