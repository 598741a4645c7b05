"""`paceline train …`: options, and nothing that needs the engine before a command runs."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from paceline.cli.support import example, need_engine
from paceline.protocol.errors import require
from paceline.runtime.config import DEFAULT_MODEL, EngineSettings, load_config
from paceline.runtime.options import takes_settings

if TYPE_CHECKING:
    from paceline_training.recipe import JointRecipe

train = typer.Typer(name="train", help="Make models for this system.", no_args_is_help=True)


@takes_settings(EngineSettings, only=("threads", "device", "trust_remote_code"))
def train_kind(
    out: Annotated[Path, typer.Option(help="Folder of the draft, its corpus and its checkpoint.")],
    kind: str,
    target: Annotated[str, typer.Option(help="The model to draft for.")] = DEFAULT_MODEL,
    layers: Annotated[
        str | None, typer.Option(help="Target layers to start from, such as 0,1,2,29.", show_default="0,1,2,last")
    ] = None,
    init: Annotated[
        str | None,
        typer.Option(help="A draft of this target to start from: a folder or default.", show_default="its layers"),
    ] = None,
    exit_layer: Annotated[
        int, typer.Option(help="Target layers before the exit.", show_default="a fifth of them")
    ] = 0,
    depth: Annotated[
        int, typer.Option(help="Tokens of a round that the drafter learns.", show_default="4; eagle, mtp 3; block 8")
    ] = 0,
    draft_vocab: Annotated[int, typer.Option(help="Most frequent ids that the draft may propose.")] = 16384,
    data: Annotated[
        Path | None,
        typer.Option(help="JSONL with prompt, messages or text; or .npz shards.", show_default="the target writes"),
    ] = None,
    self_generate: Annotated[int, typer.Option(help="Tokens that the target writes to learn from.")] = 100_000,
    temperature_mix: Annotated[
        str, typer.Option(help="TEMPERATURE:SHARE,… of the texts that the target writes.")
    ] = "1:0.5,0.6:0.25,0:0.25",
    max_length: Annotated[int, typer.Option(help="Longest text, in tokens.")] = 448,
    loss: Annotated[Literal["kl", "nla", "lk"], typer.Option(help="kl; nla, lk: after a warm-up on kl.")] = "lk",
    minutes: Annotated[float, typer.Option(help="Training time; decides the steps after a few are timed.")] = 10.0,
    tokens: Annotated[int, typer.Option(help="Tokens to learn from, repeats counted; 0: --minutes decides.")] = 0,
    learning_rate: Annotated[float, typer.Option(help="Peak of the cosine schedule.")] = 1e-3,
    batch_rows: Annotated[int, typer.Option(help="Texts in a training step.")] = 8,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(help="Precision of matrix products; auto: the faster one on this machine."),
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the texts and of their order.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the folder's checkpoint.")] = False,
    evaluation_rows: Annotated[int, typer.Option(help="Held-out texts of each temperature in the tables.")] = 8,
    focus: Annotated[
        Path | None,
        typer.Option(
            help="JSON of paceline branches: text in which the draft fails weighs more.", show_default="equal weights"
        ),
    ] = None,
    joint: Annotated[
        bool, typer.Option("--joint", help="Train the target, too: OUT gets a new target, which writes other text.")
    ] = False,
    target_learning_rate: Annotated[
        float | None, typer.Option(help="Peak of the target's schedule, with --joint.", show_default="2e-5")
    ] = None,
    **flags: object,
) -> None:
    """Train a network that drafts for a target, with text that the target writes itself."""
    need_engine(f"train {kind}")
    require(minutes > 0, "minutes", minutes, "above 0")
    require(evaluation_rows >= 1, "evaluation_rows", evaluation_rows, "at least 1")
    layer_numbers = _layer_numbers(layers)
    engine = load_config(EngineSettings, None, flags)
    from paceline.drafters.layers.manifest import TrainedKind
    from paceline.models.resolve import resolve_draft
    from paceline_training import make_draft as command
    from paceline_training import make_joint, recipe
    from paceline_training.kinds import TraineeShape
    from paceline_training.losses import Loss
    from paceline_training.writing import GenerationRecipe, parse_temperature_mix

    mix = parse_temperature_mix(temperature_mix)
    joint_recipe = _joint_recipe(joint, target_learning_rate)
    fast = "float32" if joint else recipe.fast_dtype(engine.device)
    job = command.TrainingJob(
        target=target,
        out=out,
        data=data,
        self_generate=self_generate,
        shape=TraineeShape(TrainedKind(kind), layer_numbers, exit_layer, depth),
        init=None if init is None else Path(resolve_draft(init, target)),
        draft_vocab=draft_vocab,
        generation=GenerationRecipe(seed=seed, max_length=max_length, temperature_mix=mix),
        recipe=recipe.TrainRecipe(
            loss=Loss(loss),
            tokens=tokens,
            minutes=minutes,
            learning_rate=learning_rate,
            batch_rows=batch_rows,
            seed=seed,
            dtype=fast if dtype == "auto" else dtype,
            joint=joint_recipe,
        ),
        resume=resume,
        evaluation_rows=evaluation_rows,
        focus=focus,
        engine=engine,
    )
    served_model, drafter = target, str(out)
    if joint_recipe is None:
        command.train_draft(job, Console(soft_wrap=True))
    else:
        make_joint.train_joint(job, Console(soft_wrap=True))
        served_model, drafter = str(make_joint.target_folder(job)), str(make_joint.drafter_folder(job))
    typer.echo(f"use it: paceline serve {served_model} --drafter model:{drafter}")


def _joint_recipe(enabled: bool, rate: float | None) -> JointRecipe | None:
    """How the target is trained with its drafter; None: it isn't."""
    from paceline_training.recipe import JointRecipe

    require(enabled or rate is None, "target_learning_rate", rate, "left out without --joint")
    if not enabled:
        return None
    return JointRecipe() if rate is None else JointRecipe(rate)


@dataclass(frozen=True)
class _KindCommand:
    """A kind's help, its options beyond those that every kind has, and examples."""

    text: str
    options: tuple[str, ...]
    examples: tuple[str, ...]


_JOINT = ("joint", "target_learning_rate")
_COMMANDS = {
    "draft": _KindCommand(
        "Distil a small draft model from a target, with text that the target writes itself.",
        ("layers", "init", "draft_vocab"),
        (
            "paceline train draft --target smollm2-135m --out draft --self-generate 500000 --minutes 60",
            "paceline train draft --target smollm2-135m --out narrow --data prompts.jsonl --init draft",
        ),
    ),
    "exit": _KindCommand(
        "Train an early exit: a layer and a norm behind the target's own first layers, which are not stored.",
        ("exit_layer", "draft_vocab"),
        ("paceline train exit --target smollm2-135m --out exit --exit-layer 6 --minutes 30",),
    ),
    "medusa": _KindCommand(
        "Train Medusa's heads: residual blocks in front of the target's own head, one for each token of a round.",
        ("depth", "draft_vocab", *_JOINT),
        (
            "paceline train medusa --target smollm2-135m --out medusa --minutes 15",
            "paceline train medusa --target smollm2-135m --out both --joint --minutes 60",
        ),
    ),
    "eagle": _KindCommand(
        "Train EAGLE-1: one layer that continues from the target's last hidden state.",
        ("depth",),
        ("paceline train eagle --target smollm2-135m --out eagle --minutes 60",),
    ),
    "eagle3": _KindCommand(
        "Train EAGLE-3: one layer over hidden states of three layers, trained on its own outputs.",
        ("depth", "draft_vocab"),
        ("paceline train eagle3 --target smollm2-135m --out eagle3 --minutes 60",),
    ),
    "mtp": _KindCommand(
        "Train multi-token prediction for a target that carries none.",
        ("depth", *_JOINT),
        ("paceline train mtp --target smollm2-135m --out mtp --minutes 60",),
    ),
    "block": _KindCommand(
        "Train a block drafter: all tokens of a round in one pass, on hidden states of the target.",
        ("depth", "draft_vocab"),
        ("paceline train block --target smollm2-135m --out block --minutes 60",),
    ),
}
_KIND_OPTIONS = {option for each in _COMMANDS.values() for option in each.options}


def _add_command(kind: str, spec: _KindCommand) -> None:
    """Offer `train_kind` as a command of its own, without the options of other kinds."""

    @functools.wraps(train_kind)
    def command(**flags: object) -> None:
        train_kind(kind=kind, **flags)

    hidden_options = {"kind", *_KIND_OPTIONS} - set(spec.options)
    options = inspect.signature(train_kind).parameters.values()
    parameters = [option for option in options if option.name not in hidden_options]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by inspect
    train.command(kind, help=spec.text, epilog=example(*spec.examples))(command)


for _kind, _spec in _COMMANDS.items():
    _add_command(_kind, _spec)


@train.command(
    "measure",
    epilog=example(
        "paceline train measure --draft draft --data draft/work/corpus --report acceptance.md",
        "paceline train measure --draft default --draft narrow --data narrow/work/corpus",
    ),
)
@takes_settings(EngineSettings, only=("threads", "device"))
def measure_drafts(
    draft: Annotated[list[str], typer.Option(help="A draft's folder, or default; repeatable, on the same texts.")],
    data: Annotated[Path, typer.Option(help="Finished texts: JSONL with messages or text, or .npz shards.")],
    target: Annotated[str, typer.Option(help="The model that they draft for.")] = DEFAULT_MODEL,
    held_out: Annotated[
        float, typer.Option(help="Share of the texts, the last ones, that training held out; 1: all are new to it.")
    ] = 0.05,
    rows: Annotated[int, typer.Option(help="Texts of each temperature.")] = 8,
    report: Annotated[Path | None, typer.Option(help="Markdown file to write, a JSON file beside it.")] = None,
    **flags: object,
) -> None:
    """Replay texts through drafts as they are served: acceptance by depth, accepted length, size and cost."""
    need_engine("train measure")
    from paceline_training import measure

    engine = load_config(EngineSettings, None, flags)
    job = measure.MeasurementJob(tuple(draft), data, target, held_out, rows, report, engine)
    measure.measure_drafts(job, Console(soft_wrap=True))


@train.command("pack", epilog=example("paceline train pack --draft draft --out shipped --weights int8"))
def pack_draft(
    draft: Annotated[Path, typer.Option(help="The draft's folder.")],
    out: Annotated[Path, typer.Option(help="Folder of the copy.")],
    weights: Annotated[
        Literal["float16", "int8"] | None,
        typer.Option(help="int8: one scale per row, half size.", show_default="int8; float16 in published layouts"),
    ] = None,
) -> None:
    """Copy a draft to be shipped: small, without the work folder, its files' SHA-256 in the manifest."""
    need_engine("train pack")
    from paceline.drafters.layers.manifest import TrainedKind, WeightFormat, load_manifest
    from paceline_training.checkpoint import pack_draft

    ours = TrainedKind(load_manifest(draft).kind).is_stack
    manifest = pack_draft(draft, out, WeightFormat(weights or ("int8" if ours else "float16")))
    for name, digest in manifest.files.items():
        typer.echo(f"{digest}  {out / name}")


def _layer_numbers(layers: str | None) -> tuple[int, ...]:
    if layers is None:
        return ()
    parts = layers.split(",")
    require(all(part.strip().isdecimal() for part in parts), "layers", layers, "numbers with commas between")
    return tuple(int(part) for part in parts)
