"""Dividing the cores of `paceline serve`: as told, as measured now or earlier, or by rule where nothing is known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.local.cores import Cores, MeasuredDivision, by_rule, candidates, choose, explain
from paceline.local.service_process import write_config
from paceline.local.settings import ServeSettings, draft_flags, target_flags
from paceline.local.step_cache import cache_file, keep_times, measured_for, read_times
from paceline.local.step_meter import measure, open_meters
from paceline.models.table_names import is_table
from paceline.protocol.errors import PacelineError
from paceline.runtime.config import DraftConfig, TargetConfig, load_config

Announce = Callable[[str], None]


def divide(settings: ServeSettings, total: int, folder: Path, announce: Announce, *, measures: bool) -> Cores:
    """Decide which threads target and draft get of `total` cores, and say why where there is a draft.

    Nothing that goes wrong while measuring keeps services from starting.

    Args:
        settings: of the services.
        total: cores that may be used.
        folder: for what measuring writes.
        announce: takes the reasons, line by line.
        measures: whether steps are measured if they have not been yet, which takes longer than loading the models.
    """
    if settings.cores is not None:
        told = Cores.parse(settings.cores)
        announce(f"{told.says(total)}: as the setting cores says")
        return told
    if not settings.draft_models:
        return by_rule(total, drafts=False)
    unneeded = _unneeded(settings, total)
    if unneeded:
        cores = by_rule(total, drafts=True)
        announce(f"{cores.says(total)}: {unneeded}")
        return cores
    try:
        measured = _times(settings, total, folder, announce, measures=measures)
        chosen = choose(measured)
    except (PacelineError, OSError, ValueError) as error:
        cores = by_rule(total, drafts=True)
        announce(f"{cores.says(total)}, by rule: {' '.join(str(error).split())}")
        return cores
    for line in explain(measured, chosen, total):
        announce(line)
    return chosen.cores


def _unneeded(settings: ServeSettings, total: int) -> str:
    """Why there is nothing to measure; empty: there is."""
    if total == 1:
        return "there is one core"
    if is_table(settings.model):
        return "a table model computes nothing"
    if settings.tensor_parallel_size > 1:
        return "by rule; steps of several ranks are not measured"
    return ""


def _times(
    settings: ServeSettings, total: int, folder: Path, announce: Announce, *, measures: bool
) -> tuple[MeasuredDivision, ...]:
    target = load_config(TargetConfig, None, target_flags(settings, total))
    draft = load_config(DraftConfig, None, draft_flags(settings, total))
    key: dict[str, Any] = measured_for(target, draft, total)
    kept = read_times(key)
    if kept:
        announce(f"measured earlier ({cache_file(key)}; without it they are measured again)")
        return kept
    if not measures:
        raise PacelineError("steps have not been measured on this machine; `paceline serve` does")
    announce("measuring the steps of both models, once for this machine; --cores target=N,draft=M does without")
    files = folder / "steps-of-target.toml", folder / "steps-of-draft.toml"
    write_config(TargetConfig, files[0], target_flags(settings, total))
    write_config(DraftConfig, files[1], draft_flags(settings, total))
    with open_meters(*files, total) as meters:
        measured = measure(*meters, candidates(total))
    keep_times(key, measured)
    return measured
