"""What steps took, kept from start to start: one file for each pair of models, engine settings and machine."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.costs.cost_line import CostLine
from paceline.local.cores import Cores, MeasuredDivision
from paceline.models.resolve import model_home, resolve, resolve_draft
from paceline.protocol.errors import InvalidInput
from paceline.runtime.config import DraftConfig, TargetConfig
from paceline.runtime.processor import processor_name

_PACKAGES = ("paceline", "torch", "numba")
_DIGITS = 24
"""Of the digest in a file's name."""


def measured_for(target: TargetConfig, draft: DraftConfig, cores: int) -> dict[str, Any]:
    """All that the times depend on: other models, files, settings, software or cores are measured anew."""
    drafter = resolve_draft(draft.drafters[0].partition(":")[2], draft.target_model)
    return {
        "target": _identity(target.model),
        "target_engine": target.engine.model_dump(mode="json", exclude={"threads"}),
        "draft": _identity(drafter),
        "draft_engine": draft.engine.model_dump(mode="json", exclude={"threads"}),
        "processor": processor_name(),
        "cores": cores,
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def cache_file(key: dict[str, Any]) -> Path:
    """Where the times of this key are kept."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return model_home() / "step-times" / f"{digest[:_DIGITS]}.json"


def read_times(key: dict[str, Any]) -> tuple[MeasuredDivision, ...]:
    """The times of this key; empty: none are kept, or none that can be read."""
    try:
        held = json.loads(cache_file(key).read_text())
        if held["key"] != key:
            return ()
        return tuple(_division(each) for each in held["divisions"])
    except (OSError, ValueError, KeyError, TypeError, InvalidInput):
        return ()


def keep_times(key: dict[str, Any], measured: tuple[MeasuredDivision, ...]) -> None:
    """Keep times; where nothing can be written they are measured again."""
    file = cache_file(key)
    partial = file.with_suffix(".partial")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({"key": key, "divisions": [asdict(each) for each in measured]}, indent=1))
        partial.replace(file)


def _division(held: dict[str, Any]) -> MeasuredDivision:
    return MeasuredDivision(
        Cores(**held["cores"]),
        _line(held["target"]),
        _line(held["draft"]),
        float(held["target_slowdown"]),
        float(held["draft_slowdown"]),
    )


def _line(held: dict[str, Any]) -> CostLine:
    return CostLine(tuple((float(rows), float(ms)) for rows, ms in held["points"]))


def _identity(model: str) -> dict[str, Any]:
    """A model's name with its files' sizes and times; a hub model has its name alone."""
    resolved = resolve(model)
    folder = Path(resolved.location).expanduser()
    files: list[tuple[str, int, int]] = []
    if resolved.kind in ("folder", "gguf"):
        found = [folder / resolved.gguf_file] if resolved.gguf_file else sorted(folder.iterdir())
        files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in found if file.is_file()]
    return {"name": resolved.name, "files": [list(file) for file in files]}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
