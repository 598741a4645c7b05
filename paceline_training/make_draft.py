"""`paceline train KIND`: makes a draft's folder from a target's name, and shows its progress.

The folder keeps the work beside the draft: `work/corpus` (shards) and
`work/checkpoint.pt`. A run that was stopped goes on with `--resume`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from paceline.drafters.layers.manifest import DraftManifest, TargetFingerprint, check_target, load_manifest
from paceline.drafters.layers.stack import WEIGHTS_FILE, copy_weights, load_draft_engine
from paceline.drafters.layers.student import Target
from paceline.drafters.layers.vocabulary import DraftVocabulary
from paceline.engine.loading import load_engine
from paceline.engine.weights import set_threads
from paceline.models.pull import file_digest
from paceline.protocol.errors import require
from paceline.runtime.config import DEFAULT_MODEL, EngineSettings
from paceline.sampling.racing import warm_up
from paceline_training import measure
from paceline_training.checkpoint import StackTrainee, save_draft, save_manifest
from paceline_training.corpus import Row, Split, count_learned_tokens, split_rows
from paceline_training.distill import Distiller, Pace, StepReport, load_state, run
from paceline_training.focus import position_weights, read_focus
from paceline_training.kinds import TraineeShape, make_trainee, manifest_of
from paceline_training.recipe import TrainRecipe, recipe_facts
from paceline_training.text_kinds import TextKinds
from paceline_training.user_data import UserData, read_data
from paceline_training.vocabulary import choose_vocabulary, coverage
from paceline_training.writing import GenerationRecipe, Writer, self_generate

DEFAULT_GENERATED_TOKENS = 100_000
DEFAULT_DRAFT_VOCAB = 16384
"""Both chosen, not tuned."""


@dataclass(frozen=True)
class TrainingJob:
    """Settings of `paceline train KIND`.

    Attributes:
        data: JSONL file, `.npz` shard, or folder of shards; None: the target writes its own text.
        self_generate: learned tokens to write; with JSONL prompts: at most that many.
        shape: what is trained; of a `draft` without layers: those of `init`, or the first three and the last.
        init: folder of a draft of the same target to start from; None: from the target's own layers.
        evaluation_rows: held-out rows of each temperature in the final tables.
        focus: report of branching points by which positions are weighed; None: all count alike.
    """

    target: str = DEFAULT_MODEL
    out: Path = Path("draft")
    data: Path | None = None
    self_generate: int = DEFAULT_GENERATED_TOKENS
    shape: TraineeShape = field(default_factory=TraineeShape)
    init: Path | None = None
    draft_vocab: int = DEFAULT_DRAFT_VOCAB
    generation: GenerationRecipe = field(default_factory=GenerationRecipe)
    recipe: TrainRecipe = field(default_factory=TrainRecipe)
    pace: Pace = field(default_factory=Pace)
    resume: bool = False
    evaluation_rows: int = 8
    focus: Path | None = None
    engine: EngineSettings = field(default_factory=EngineSettings)

    @property
    def work(self) -> Path:
        """Folder of what only training needs."""
        return self.out / "work"

    @property
    def checkpoint(self) -> Path:
        """File that `resume` goes on from."""
        return self.work / "checkpoint.pt"


def train_draft(job: TrainingJob, console: Console) -> DraftManifest:
    """Make a draft and measure it.

    Raises:
        PacelineError: bad settings, a target that drafts can't be made from, unreadable data.
    """
    resumes = job.resume and job.checkpoint.exists()
    require(resumes or not job.checkpoint.exists(), "out", str(job.out), "an unused folder, or give --resume")
    job.work.mkdir(parents=True, exist_ok=True)
    set_threads(job.engine.threads)
    warm_up()
    setup = prepare(job, console)
    target, recipe = setup.target, setup.recipe
    trainee = make_trainee(setup.shape, target, setup.vocabulary)
    if job.init is not None and isinstance(trainee, StackTrainee):
        copy_weights(job.init, trainee)
    distiller = Distiller(target.model, trainee, setup.split, recipe, setup.position_weights)
    if resumes:
        go_on(distiller, job.checkpoint, console)
    manifest = manifest_of(setup.shape, TargetFingerprint.from_target(target), trainee, setup.facts)

    def save() -> None:
        trained_manifest = replace(manifest, training=training_facts(job, distiller), versions=measure.versions())
        save_draft(job.out, trainee, trained_manifest)

    run_with_progress(job, distiller, save, console)
    save()
    return measure_saved(job, setup.split.held_out, console)


@dataclass(frozen=True, eq=False)
class TrainingSetup:
    """What a run starts from: target, texts, vocabulary and recipe.

    Attributes:
        recipe: the job's, with the weights by cell of its `focus` report if it has one.
        facts: what the manifest says of the texts.
    """

    target: Target
    shape: TraineeShape
    split: Split
    vocabulary: DraftVocabulary
    recipe: TrainRecipe
    position_weights: Mapping[Row, NDArray[np.float32]]
    facts: Mapping[str, Any]


def prepare(job: TrainingJob, console: Console) -> TrainingSetup:
    """Load the target, and read or write the texts.

    Raises:
        PacelineError: bad settings, a target that drafts can't be made from, unreadable data.
    """
    target = Target.load(job.target, job.engine)
    recipe = job.recipe
    if job.focus is not None:
        recipe = replace(recipe, focus=read_focus(job.focus, target.tokenizer))
    shape = _shape(job, target)
    data = UserData(())  # the target asks and answers
    if job.data is not None:
        data = read_data(job.data, target.tokenizer, job.generation.max_length)
    split = split_rows(_all_rows(job, target, data, console))
    size, ends = target.tokenizer.vocab_size, target.tokenizer.eos_token_ids
    vocab_size = min(job.draft_vocab, size) if shape.kind.reduces else size
    vocabulary = choose_vocabulary(split.train, vocab_size, size, always=ends)
    facts = _data_facts(job, data, split, vocabulary)
    weights = _position_weights(recipe, split, target)
    return TrainingSetup(target, shape, split, vocabulary, recipe, weights, facts)


def go_on(distiller: Distiller, checkpoint: Path, console: Console) -> None:
    """Resume a stopped run from its checkpoint.

    Raises:
        InvalidInput: the checkpoint is another run's, or can't be read.
    """
    distiller.restore(load_state(checkpoint))
    console.print(f"resumed at step {distiller.step_number} of {distiller.total_steps or '?'}")


def _shape(job: TrainingJob, target: Target) -> TraineeShape:
    """The job's shape with its layers resolved."""
    shape = job.shape.on(target)
    if job.init is None:
        return shape
    manifest = load_manifest(job.init)
    check_target(manifest, target, job.init.name)
    require(manifest.kind == shape.kind, "init", manifest.kind, f"a folder of kind {shape.kind}")
    agrees = job.shape.layers in ((), manifest.layers)
    require(agrees, "layers", job.shape.layers, f"{manifest.layers}, as in {job.init.name}")
    return replace(shape, layers=manifest.layers)


def _position_weights(recipe: TrainRecipe, split: Split, target: Target) -> Mapping[Row, NDArray[np.float32]]:
    if not recipe.focus:
        return {}
    return position_weights(split.train, recipe.focus, TextKinds(target.tokenizer))


def _all_rows(job: TrainingJob, target: Target, data: UserData, console: Console) -> list[Row]:
    """Texts to learn from: the user's finished ones, and what the target writes."""
    if data.rows and not data.prompts:
        return list(data.rows)
    settings = job.engine.model_copy(update={"max_num_seqs": max(job.generation.batch_rows, 1)})
    writer = Writer(load_engine(job.target, settings), target.tokenizer, job.generation, data.prompts)
    tokens = job.self_generate
    with measure.bar(console) as progress:
        task = progress.add_task("writing text", total=tokens)

        def show(written_tokens: int) -> None:
            progress.update(task, completed=min(written_tokens, tokens))

        return [*data.rows, *self_generate(writer, job.work / "corpus", tokens, target.weights, show)]


def run_with_progress(job: TrainingJob, distiller: Distiller, on_save: Callable[[], None], console: Console) -> None:
    """Train to the end and show progress; `on_save` is called after each checkpoint."""
    with measure.bar(console) as progress:
        task = progress.add_task("training", total=None)
        for report in run(distiller, job.checkpoint, job.pace, on_save):
            line, total = _step_line(report), report.total_steps or None
            progress.update(task, completed=report.step, total=total, description=line)
            if not console.is_terminal and report.step % job.pace.measure_steps == 0:
                console.print(line)


def training_facts(job: TrainingJob, distiller: Distiller) -> dict[str, Any]:
    """What a manifest says of the training so far."""
    start = {} if job.init is None else {"init_sha256": file_digest(job.init / WEIGHTS_FILE)}
    return {
        "command": measure.command_line(),
        **start,
        **recipe_facts(distiller.recipe),
        "steps": distiller.step_number,
        "total_steps": distiller.total_steps,
        "tokens_seen": distiller.tokens_seen,
        "seconds": round(distiller.seconds),
        "held_out_overlap": round(distiller.held_out, 4),
    }


def measure_saved(job: TrainingJob, held_out: Sequence[Row], console: Console) -> DraftManifest:
    """Evaluate the saved draft through the serving path, print the tables, and keep them in its manifest."""
    target = load_engine(job.target, job.engine)
    draft = load_draft_engine(str(job.out), job.engine, job.target)
    rows = measure.first_of_each(held_out, job.evaluation_rows)
    measurement = measure.measure_draft(target, draft, job.out, rows, console)
    acceptance = {**measurement.facts, "machine": measure.machine(job.engine)}
    manifest = replace(load_manifest(job.out), acceptance=acceptance)
    save_manifest(job.out, manifest)
    measure.show(console, measurement)
    return manifest


def _step_line(report: StepReport) -> str:
    time_left = f"{int(report.seconds_left) // 60}:{int(report.seconds_left) % 60:02}"
    return (
        f"step {report.step}/{report.total_steps or '?'} loss {report.loss:.3f} acceptance {report.acceptance:.3f} "
        f"held-out {report.held_out:.3f} {report.tokens_per_second:.0f} tokens/s left {time_left}"
    )


def _data_facts(job: TrainingJob, data: UserData, split: Split, vocabulary: DraftVocabulary) -> dict[str, Any]:
    source: dict[str, Any] = {"source": "self-generated" if job.data is None else job.data.name}
    if job.data is not None and job.data.is_file():
        source["sha256"] = file_digest(job.data)
    if not data.rows or data.prompts:
        source |= asdict(job.generation)
    return {
        **source,
        "train_rows": len(split.train),
        "train_tokens": count_learned_tokens(split.train),
        "held_out_rows": len(split.held_out),
        "held_out_tokens": count_learned_tokens(split.held_out),
        "held_out_coverage": round(coverage(split.held_out, vocabulary), 4),
    }
