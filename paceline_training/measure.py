"""Acceptance tables of finished drafts: measured on the serving path, printed, and written as a report."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from paceline.drafters.layers.manifest import DraftManifest, load_manifest
from paceline.drafters.layers.stack import WEIGHTS_FILE, load_draft_engine
from paceline.engine.interface import Engine
from paceline.engine.loading import load_engine
from paceline.engine.weights import set_threads
from paceline.models.gguf import library_versions
from paceline.models.resolve import resolve_draft
from paceline.models.tokenizer import load_tokenizer
from paceline.protocol.errors import require
from paceline.runtime.config import DEFAULT_MODEL, EngineSettings
from paceline.runtime.process import processor_name
from paceline.sampling.racing import warm_up
from paceline_training import evaluate
from paceline_training.corpus import HELD_OUT_SHARE, Row, split_rows
from paceline_training.user_data import read_data

COST_PREFIX = 64
"""Length of the prefix after which a step is timed, in tokens; chosen, not tuned."""


@dataclass(frozen=True)
class Measurement:
    """Acceptance and cost of one draft on a set of texts."""

    tables: tuple[evaluate.AcceptanceTable, ...]
    costs: evaluate.CostRatio
    file_bytes: int

    @property
    def facts(self) -> dict[str, Any]:
        """In plain values, as manifests keep them."""
        return {
            "tables": [
                asdict(table)
                | {
                    "overlap": round(table.overlap, 4),
                    "coupled_match": round(table.coupled_match, 4),
                    "by_depth": [round(value, 4) for value in table.by_depth],
                    "accepted_length": [round(value, 3) for value in table.accepted_length],
                }
                for table in self.tables
            ],
            "target_step_ms": round(self.costs.target_ms, 3),
            "draft_step_ms": round(self.costs.draft_ms, 3),
            "cost_ratio": round(self.costs.ratio, 4),
            "file_bytes": self.file_bytes,
        }


@contextmanager
def bar(console: Console) -> Iterator[Progress]:
    """A progress bar, on terminals alone."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield progress


def measure_draft(target: Engine, draft: Engine, folder: Path, rows: Sequence[Row], console: Console) -> Measurement:
    """Replay texts through the engines that services run."""
    with bar(console) as progress:
        task = progress.add_task("held-out acceptance", total=len(rows))
        tables = evaluate.acceptance_tables(target, draft, rows, lambda count: progress.update(task, completed=count))
    prefix = rows[0].token_ids[: min(COST_PREFIX, target.info.max_length - 1)].tolist()
    return Measurement(tables, evaluate.cost_ratio(target, draft, prefix), (folder / WEIGHTS_FILE).stat().st_size)


def first_of_each(rows: Sequence[Row], count: int) -> list[Row]:
    """The first `count` rows of each temperature."""
    counts: dict[float, int] = {}
    first_rows: list[Row] = []
    for row in rows:
        counts[row.temperature] = counts.get(row.temperature, 0) + 1
        if counts[row.temperature] <= count:
            first_rows.append(row)
    return first_rows


@dataclass(frozen=True)
class MeasurementJob:
    """Settings of `paceline train measure`.

    Attributes:
        drafts: folders, or `default` for the target's own of `paceline-drafts`.
        data: finished texts: JSONL, `.npz` shard, or folder of shards.
        held_out: share of the rows of each temperature, from the end; training holds out `HELD_OUT_SHARE`. 1: all.
        rows: rows of each temperature to replay.
        report: Markdown file to write, with a JSON file beside it; None: none.
    """

    drafts: tuple[str, ...]
    data: Path
    target: str = DEFAULT_MODEL
    held_out: float = HELD_OUT_SHARE
    rows: int = 8
    report: Path | None = None
    engine: EngineSettings = field(default_factory=EngineSettings)

    def __post_init__(self) -> None:
        require(bool(self.drafts), "drafts", self.drafts, "at least 1")
        require(0 < self.held_out <= 1, "held_out", self.held_out, "in (0, 1]")
        require(self.rows >= 1, "rows", self.rows, "at least 1")


def measure_drafts(job: MeasurementJob, console: Console) -> dict[str, Measurement]:
    """Measure drafts on the same texts; prints and reports the tables of each.

    Raises:
        PacelineError: unreadable data, a draft of another target.
    """
    folders = {_without_folders(name): Path(resolve_draft(name, job.target)) for name in job.drafts}
    require(len(folders) == len(job.drafts), "drafts", job.drafts, "folders of different names")
    set_threads(job.engine.threads)
    warm_up()
    target = load_engine(job.target, job.engine)
    tokenizer = load_tokenizer(job.target, trust_remote_code=job.engine.trust_remote_code)
    data = read_data(job.data, tokenizer, target.info.max_length)
    require(not data.prompts, "data", job.data.name, "finished texts alone: prompts have nothing to replay")
    rows = first_of_each(split_rows(data.rows, job.held_out).held_out, job.rows)
    measurements: dict[str, Measurement] = {}
    for name, folder in folders.items():
        draft = load_draft_engine(str(folder), job.engine, job.target)
        measurements[name] = measure_draft(target, draft, folder, rows, console)
        console.print(f"draft {name}")
        show(console, measurements[name])
    if job.report is not None:
        write_report(job.report, _report_facts(job, folders, rows), measurements)
        console.print(f"written: {job.report}")
    return measurements


def show(console: Console, measurement: Measurement) -> None:
    """Print held-out acceptance by depth, mean accepted length by k, file size and cost."""
    for title, columns, lines in _grids(measurement):
        # 80 columns hold it.
        grid = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
        for column in columns:
            grid.add_column(column, justify="right")
        for line in lines:
            grid.add_row(*line)
        console.print(grid)
    for sentence in _sentences(measurement):
        console.print(sentence)


def write_report(file: Path, facts: Mapping[str, Any], measurements: Mapping[str, Measurement]) -> None:
    """Write measurements as Markdown, and as JSON beside it."""
    parts = [
        "# Acceptance of drafts on held-out text\n",
        "".join(f"- {key}: {value}\n" for key, value in facts.items()),
    ]
    for name, measurement in measurements.items():
        parts.append(f"## {name}\n")
        for title, columns, lines in _grids(measurement):
            grid = [columns, ["---"] * len(columns), *lines]
            parts.append(f"{title}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in grid))
        parts.append("; ".join(_sentences(measurement)) + ".\n")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(parts))
    values = {"facts": facts, "drafts": {name: measurement.facts for name, measurement in measurements.items()}}
    file.with_suffix(".json").write_text(json.dumps(values, indent=2) + "\n")


Grid = tuple[str, list[str], list[list[str]]]
"""Title, columns, lines."""


def _grids(measurement: Measurement) -> list[Grid]:
    depths = [str(depth) for depth in range(1, evaluate.MAX_K + 1)]
    columns = ["T", "part", "tokens", "1 - TV", "match", *depths]
    grids: list[Grid] = []
    for title, values in (
        ("acceptance by depth (coupled, k = 8)", [table.by_depth for table in measurement.tables]),
        ("mean accepted tokens a round by k (coupled)", [table.accepted_length for table in measurement.tables]),
    ):
        lines = [
            [f"{table.temperature:g}", table.part, str(table.positions)]
            + [f"{figure:.3f}" for figure in (table.overlap, table.coupled_match, *row)]
            for table, row in zip(measurement.tables, values, strict=True)
        ]
        grids.append((title, columns, lines))
    return grids


def _sentences(measurement: Measurement) -> list[str]:
    costs = measurement.costs
    return [
        f"file size {measurement.file_bytes / 1e6:.1f} MB",
        f"one step: target {costs.target_ms:.1f} ms, draft {costs.draft_ms:.1f} ms, ratio {costs.ratio:.3f}",
    ]


def _report_facts(job: MeasurementJob, folders: Mapping[str, Path], rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "command": command_line(),
        "target": job.target,
        **{f"draft {name}": _origin(load_manifest(folder)) for name, folder in folders.items()},
        "data": f"{job.data.name}, the first {job.rows} texts of each temperature in the last "
        f"{job.held_out:g} of them: {len(rows)}",
        "machine": machine(job.engine),
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
    }


def _origin(manifest: DraftManifest) -> str:
    training = manifest.training
    return f"{manifest.weights} weights, {training.get('steps')} steps, {training.get('tokens_seen')} tokens seen"


def command_line() -> str:
    """This process's command, its absolute paths cut short."""
    return " ".join(_without_folders(word) for word in sys.argv)


def _without_folders(word: str) -> str:
    """The last part of an absolute path. Reports and manifests leave the machine that they were made on."""
    return Path(word).name if Path(word).is_absolute() else word


def versions() -> dict[str, str]:
    """Versions of the libraries that decide a draft's numbers."""
    import numba

    return {**library_versions(), "numba": numba.__version__, "python": platform.python_version()}


def machine(settings: EngineSettings) -> str:
    """Processor or GPU, cores, threads and load of the machine that measures."""
    if settings.device != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{processor_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads{load}"
