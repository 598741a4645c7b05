"""`paceline train KIND`: from a target's name to a draft's folder, with everything shown on the way.

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
from paceline.drafters.layers.served import load_draft_engine
from paceline.drafters.layers.stack import WEIGHTS_FILE, copy_weights
from paceline.drafters.layers.student import Target
from paceline.drafters.layers.vocabulary import DraftVocabulary
from paceline.engine.loading import load_engine
from paceline.engine.weights import set_threads
from paceline.models.wheels import file_digest
from paceline.protocol.errors import require
from paceline.runtime.config import DEFAULT_MODEL, EngineSettings
from paceline.sampling.racing import warm_up
from paceline_training import measure
from paceline_training.checkpoint import StackTrainee, save_draft, save_manifest
from paceline_training.corpus import Row, Split, count_learned, split_rows
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
class TrainDraft:
    """What the command was asked for.

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
    ready = prepare(wanted, console)
    target, recipe = ready.target, ready.recipe
    trainee = make_trainee(ready.shape, target, ready.vocabulary)
    if wanted.init is not None and isinstance(trainee, StackTrainee):
        copy_weights(wanted.init, trainee)
    distiller = Distiller(target.model, trainee, ready.split, recipe, ready.position_weights)
    if resumes:
        go_on(distiller, wanted.checkpoint, console)
    manifest = manifest_of(ready.shape, TargetFingerprint.of(target), trainee, ready.facts)

    def save() -> None:
        made = replace(manifest, training=training_facts(wanted, distiller), versions=measure.versions())
        save_draft(wanted.out, trainee, made)

    run_shown(wanted, distiller, save, console)
    save()
    return measure_saved(wanted, ready.split.held_out, console)


@dataclass(frozen=True, eq=False)
class PreparedTraining:
    """What a run learns from, and what it makes of it.

    Attributes:
        recipe: the wanted one, with the weights of its report where positions are weighed by one.
        facts: of the texts, for the manifest.
    """

    target: Target
    shape: TraineeShape
    split: Split
    vocabulary: DraftVocabulary
    recipe: TrainRecipe
    position_weights: Mapping[Row, NDArray[np.float32]]
    facts: Mapping[str, Any]


def prepare(wanted: TrainDraft, console: Console) -> PreparedTraining:
    """Load the target, and read or write the texts.

    Raises:
        PacelineError: bad settings, a target that drafts can't be made from, unreadable data.
    """
    target = Target.load(wanted.target, wanted.engine)
    recipe = wanted.recipe
    if wanted.focus is not None:
        recipe = replace(recipe, focus=read_focus(wanted.focus, target.tokenizer))
    shape = _shape(wanted, target)
    data = UserData(())  # the target asks and answers
    if wanted.data is not None:
        data = read_data(wanted.data, target.tokenizer, wanted.generation.max_length)
    split = split_rows(_all_rows(wanted, target, data, console))
    size, ends = target.tokenizer.vocab_size, target.tokenizer.eos_token_ids
    most = min(wanted.draft_vocab, size) if shape.kind.reduces else size
    vocabulary = choose_vocabulary(split.train, most, size, always=ends)
    facts = _data_facts(wanted, data, split, vocabulary)
    counts = _position_weights(recipe, split, target)
    return PreparedTraining(target, shape, split, vocabulary, recipe, counts, facts)


def go_on(distiller: Distiller, checkpoint: Path, console: Console) -> None:
    """Go on where a run was stopped.

    Raises:
        InvalidInput: the checkpoint is another run's, or can't be read.
    """
    distiller.restore(load_state(checkpoint))
    console.print(f"resumed at step {distiller.step_number} of {distiller.total_steps or '?'}")


def _shape(wanted: TrainDraft, target: Target) -> TraineeShape:
    """What is trained, its layers named."""
    shape = wanted.shape.on(target)
    if wanted.init is None:
        return shape
    manifest = load_manifest(wanted.init)
    check_target(manifest, target, wanted.init.name)
    require(manifest.kind == shape.kind, "init", manifest.kind, f"a folder of kind {shape.kind}")
    agrees = wanted.shape.layers in ((), manifest.layers)
    require(agrees, "layers", wanted.shape.layers, f"{manifest.layers}, as in {wanted.init.name}")
    return replace(shape, layers=manifest.layers)


def _position_weights(recipe: TrainRecipe, split: Split, target: Target) -> Mapping[Row, NDArray[np.float32]]:
    if not recipe.focus:
        return {}
    return position_weights(split.train, recipe.focus, TextKinds(target.tokenizer))


def _all_rows(wanted: TrainDraft, target: Target, data: UserData, console: Console) -> list[Row]:
    """Texts to learn from: the user's finished ones, and what the target writes."""
    if data.rows and not data.prompts:
        return list(data.rows)
    settings = wanted.engine.model_copy(update={"max_num_seqs": max(wanted.generation.batch_rows, 1)})
    writer = Writer(load_engine(wanted.target, settings), target.tokenizer, wanted.generation, data.prompts)
    tokens = wanted.self_generate
    with measure.bar(console) as progress:
        task = progress.add_task("writing text", total=tokens)

        def show(done: int) -> None:
            progress.update(task, completed=min(done, tokens))

        return [*data.rows, *self_generate(writer, wanted.work / "corpus", tokens, target.weights, show)]


def run_shown(wanted: TrainDraft, distiller: Distiller, saved: Callable[[], None], console: Console) -> None:
    """Train to the end, progress shown; `saved` is called after each checkpoint."""
    with measure.bar(console) as progress:
        task = progress.add_task("training", total=None)
        for report in run(distiller, wanted.checkpoint, wanted.pace, saved):
            line, total = _step_line(report), report.total_steps or None
            progress.update(task, completed=report.step, total=total, description=line)
            if not console.is_terminal and report.step % wanted.pace.measure_steps == 0:
                console.print(line)


def training_facts(wanted: TrainDraft, distiller: Distiller) -> dict[str, Any]:
    """What a manifest says of the training so far."""
    start = {} if wanted.init is None else {"init_sha256": file_digest(wanted.init / WEIGHTS_FILE)}
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


def measure_saved(wanted: TrainDraft, held_out: Sequence[Row], console: Console) -> DraftManifest:
    """Evaluate the saved draft through the serving path, print the tables, and keep them in its manifest."""
    target = load_engine(wanted.target, wanted.engine)
    draft = load_draft_engine(str(wanted.out), wanted.engine, wanted.target)
    rows = measure.first_of_each(held_out, wanted.evaluation_rows)
    found = measure.measure_draft(target, draft, wanted.out, rows, console)
    acceptance = {**found.facts, "machine": measure.machine(wanted.engine)}
    manifest = replace(load_manifest(wanted.out), acceptance=acceptance)
    save_manifest(wanted.out, manifest)
    measure.show(console, found)
    return manifest


def _step_line(report: StepReport) -> str:
    left = f"{int(report.seconds_left) // 60}:{int(report.seconds_left) % 60:02}"
    return (
        f"step {report.step}/{report.total_steps or '?'} loss {report.loss:.3f} acceptance {report.acceptance:.3f} "
        f"held-out {report.held_out:.3f} {report.tokens_per_second:.0f} tokens/s left {left}"
    )


def _data_facts(wanted: TrainDraft, data: UserData, split: Split, vocabulary: DraftVocabulary) -> dict[str, Any]:
    source: dict[str, Any] = {"source": "self-generated" if wanted.data is None else wanted.data.name}
    if wanted.data is not None and wanted.data.is_file():
        source["sha256"] = file_digest(wanted.data)
    if not data.rows or data.prompts:
        source |= asdict(wanted.generation)
    return {
        **source,
        "train_rows": len(split.train),
        "train_tokens": count_learned(split.train),
        "held_out_rows": len(split.held_out),
        "held_out_tokens": count_learned(split.held_out),
        "held_out_coverage": round(coverage(split.held_out, vocabulary), 4),
    }
