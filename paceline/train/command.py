"""`paceline train draft`: from a target's name to a draft's folder, with everything shown on the way.

The folder keeps the work beside the draft: `work/corpus` (shards) and
`work/checkpoint.pt`. A run that was stopped goes on with `--resume`.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numba
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from paceline.config import DEFAULT_MODEL, EngineSettings
from paceline.engine.decoder import set_threads
from paceline.engine.loading import load_engine
from paceline.models import library_versions
from paceline.noise import warm_up
from paceline.train import evaluate
from paceline.train.checkpoint import (
    WEIGHTS_FILE,
    DraftManifest,
    load_draft_engine,
    load_manifest,
    save_draft,
    save_manifest,
    with_results,
)
from paceline.train.corpus import (
    GenerationRecipe,
    Row,
    Split,
    TokenIds,
    Writer,
    count_learned,
    read_jsonl,
    read_shards,
    self_generate,
    split_rows,
)
from paceline.train.distill import Distiller, Pace, StepReport, TrainRecipe, load_state, recipe_facts, run
from paceline.train.student import Target, build_student, default_layers
from paceline.train.vocabulary import DraftVocabulary, choose_vocabulary, coverage
from paceline.types import require

DEFAULT_GENERATED_TOKENS = 100_000
DEFAULT_DRAFT_VOCAB = 16384


@dataclass(frozen=True)
class TrainDraft:
    """What the command was asked for.

    Attributes:
        data: JSONL file, `.npz` shard, or folder of shards; None: the target writes its own text.
        self_generate: learned tokens to write; with JSONL prompts: at most that many.
        layers: empty: the first three and the last.
        evaluation_rows: held-out rows of each temperature in the final tables.
    """

    target: str = DEFAULT_MODEL
    out: Path = Path("draft")
    data: Path | None = None
    self_generate: int = DEFAULT_GENERATED_TOKENS
    layers: tuple[int, ...] = ()
    draft_vocab: int = DEFAULT_DRAFT_VOCAB
    generation: GenerationRecipe = field(default_factory=GenerationRecipe)
    recipe: TrainRecipe = field(default_factory=TrainRecipe)
    pace: Pace = field(default_factory=Pace)
    resume: bool = False
    evaluation_rows: int = 8
    engine: EngineSettings = field(default_factory=EngineSettings)

    @property
    def work(self) -> Path:
        """Folder of what only training needs."""
        return self.out / "work"

    @property
    def checkpoint(self) -> Path:
        """File that `resume` goes on from."""
        return self.work / "checkpoint.pt"


def train_draft(wanted: TrainDraft, console: Console) -> DraftManifest:
    """Make a draft and measure it.

    Raises:
        PacelineError: bad settings, a target that drafts can't be made from, unreadable data.
    """
    resumes = wanted.resume and wanted.checkpoint.exists()
    require(resumes or not wanted.checkpoint.exists(), "out", str(wanted.out), "an unused folder, or give --resume")
    wanted.work.mkdir(parents=True, exist_ok=True)
    set_threads(wanted.engine.threads)
    warm_up()
    target = Target.load(wanted.target, wanted.engine)
    rows = _read_rows(wanted, target, console)
    split = split_rows(rows)
    size, ends = target.tokenizer.vocab_size, target.tokenizer.eos_token_ids
    vocabulary = choose_vocabulary(split.train, min(wanted.draft_vocab, size), size, always=ends)
    layers = wanted.layers or default_layers(target.model.config.get_text_config().num_hidden_layers)
    student = build_student(target.model, layers, vocabulary)
    distiller = Distiller(target.model, student, vocabulary, split, wanted.recipe)
    if resumes:
        distiller.restore(load_state(wanted.checkpoint))
        console.print(f"resumed at step {distiller.step_number} of {distiller.total_steps or '?'}")
    manifest = replace(
        DraftManifest.of_target(target, layers, vocabulary), data=_data_facts(wanted, split, vocabulary)
    )
    _train(wanted, distiller, manifest, console)
    return measure_draft(wanted, split.held_out, console)


def measure_draft(wanted: TrainDraft, held_out: Sequence[Row], console: Console) -> DraftManifest:
    """Evaluate a saved draft through the serving path, print the tables, and keep them in its manifest."""
    target = load_engine(wanted.target, wanted.engine)
    draft = load_draft_engine(str(wanted.out), wanted.engine, wanted.target)
    rows = _first_of_each(held_out, wanted.evaluation_rows)
    with _bar(console) as progress:
        task = progress.add_task("held-out acceptance", total=len(rows))
        tables = evaluate.acceptance_tables(target, draft, rows, lambda done: progress.update(task, completed=done))
    prefix = rows[0].token_ids[: min(64, target.info.max_length - 1)].tolist()
    costs = evaluate.cost_ratio(target, draft, prefix)
    size = (wanted.out / WEIGHTS_FILE).stat().st_size
    results = {**evaluate.as_json(tables, costs, size), "machine": _machine(wanted.engine)}
    manifest = with_results(load_manifest(wanted.out), results)
    save_manifest(wanted.out, manifest)
    show_tables(console, tables, costs, size)
    return manifest


def show_tables(
    console: Console, tables: Sequence[evaluate.AcceptanceTable], costs: evaluate.CostRatio, size: int
) -> None:
    """Print held-out acceptance by depth, mean accepted length by k, file size and cost."""
    for title, values in (
        ("acceptance by depth (coupled, k = 8)", [table.by_depth for table in tables]),
        ("mean accepted tokens a round by k", [table.accepted_length for table in tables]),
    ):
        shown = Table(title=title, title_justify="left")
        columns = ("temperature", "part", "positions", "1 - TV", "match", *map(str, range(1, evaluate.MAX_K + 1)))
        for column in columns:
            shown.add_column(column, justify="right")
        for table, row in zip(tables, values, strict=True):
            head = (f"{table.temperature:g}", table.part, str(table.positions))
            figures = (table.overlap, table.coupled_match, *row)
            shown.add_row(*head, *(f"{figure:.3f}" for figure in figures))
        console.print(shown)
    console.print(f"file size {size / 1e6:.1f} MB")
    console.print(
        f"one step: target {costs.target_ms:.1f} ms, draft {costs.draft_ms:.1f} ms, ratio {costs.ratio:.3f}"
    )


def _read_rows(wanted: TrainDraft, target: Target, console: Console) -> list[Row]:
    """Text to train on: shards, the user's own, or what the target writes."""
    prompts: tuple[TokenIds, ...] = ()
    finished: list[Row] = []
    if wanted.data is not None and wanted.data.suffix != ".jsonl":
        rows = read_shards(wanted.data)
        largest = max(int(row.token_ids.max(initial=0)) for row in rows)
        require(largest < target.tokenizer.vocab_size, "data token id", largest, "an id of the target's")
        return rows
    if wanted.data is not None:
        given = read_jsonl(wanted.data, target.tokenizer, wanted.generation.max_length)
        prompts, finished = given.prompts, list(given.rows)
    if wanted.data is not None and not prompts:
        return finished
    settings = wanted.engine.model_copy(update={"max_num_seqs": max(wanted.generation.batch_rows, 1)})
    writer = Writer(load_engine(wanted.target, settings), target.tokenizer, wanted.generation, prompts)
    with _bar(console) as progress:
        task = progress.add_task("writing text", total=wanted.self_generate)
        written = self_generate(
            writer,
            wanted.work / "corpus",
            wanted.self_generate,
            target.weights,
            lambda done: progress.update(task, completed=min(done, wanted.self_generate)),
        )
    return [*finished, *written]


def _train(wanted: TrainDraft, distiller: Distiller, manifest: DraftManifest, console: Console) -> None:
    def save() -> None:
        training = {
            **recipe_facts(wanted.recipe),
            "steps": distiller.step_number,
            "total_steps": distiller.total_steps,
            "tokens_seen": distiller.tokens_seen,
            "held_out_overlap": round(distiller.held_out, 4),
        }
        made = replace(manifest, training=training, versions=_versions())
        save_draft(wanted.out, distiller.student, distiller.vocabulary, made)

    with _bar(console) as progress:
        task = progress.add_task("distilling", total=None)
        for report in run(distiller, wanted.checkpoint, wanted.pace, save):
            _show_step(progress, task, report)
            if not console.is_terminal and report.step % wanted.pace.measure_steps == 0:
                console.print(_step_line(report))
    save()


def _show_step(progress: Progress, task: TaskID, report: StepReport) -> None:
    total = report.total_steps or None
    progress.update(task, completed=report.step, total=total, description=_step_line(report))


def _step_line(report: StepReport) -> str:
    left = f"{int(report.seconds_left) // 60}:{int(report.seconds_left) % 60:02}"
    return (
        f"step {report.step}/{report.total_steps or '?'} loss {report.loss:.3f} acceptance {report.acceptance:.3f} "
        f"held-out {report.held_out:.3f} {report.tokens_per_second:.0f} tokens/s left {left}"
    )


@contextmanager
def _bar(console: Console) -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield progress


def _first_of_each(rows: Sequence[Row], count: int) -> list[Row]:
    """The first `count` rows of each temperature."""
    taken: dict[float, int] = {}
    chosen: list[Row] = []
    for row in rows:
        taken[row.temperature] = taken.get(row.temperature, 0) + 1
        if taken[row.temperature] <= count:
            chosen.append(row)
    return chosen


def _data_facts(wanted: TrainDraft, split: Split, vocabulary: DraftVocabulary) -> dict[str, Any]:
    if wanted.data is None:
        source: dict[str, Any] = {"source": "self-generated", **asdict(wanted.generation)}
    else:
        source = {"source": wanted.data.name}
    return {
        **source,
        "train_rows": len(split.train),
        "train_tokens": count_learned(split.train),
        "held_out_rows": len(split.held_out),
        "held_out_tokens": count_learned(split.held_out),
        "held_out_coverage": round(coverage(split.held_out, vocabulary), 4),
    }


def _versions() -> dict[str, str]:
    return {**library_versions(), "numba": numba.__version__, "python": platform.python_version()}


def _machine(settings: EngineSettings) -> str:
    return f"{platform.machine()} {settings.device}, {torch.get_num_threads()} threads"
