"""`paceline train …`: options, and nothing that needs the engine before a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from paceline.cli.support import example, need_engine
from paceline.protocol.errors import require
from paceline.runtime.config import DEFAULT_MODEL, EngineSettings, load_config
from paceline.runtime.options import takes_settings

train = typer.Typer(help="Make models for this system.", no_args_is_help=True)


@train.command(
    "draft",
    epilog=example(
        "paceline train draft --target smollm2-135m --out draft --self-generate 500000 --minutes 60",
        "paceline train draft --target smollm2-135m --out narrow --data prompts.jsonl --init draft --tokens 400000",
    ),
)
@takes_settings(EngineSettings, only=("threads", "device", "trust_remote_code"))
def train_draft(
    out: Annotated[Path, typer.Option(help="Folder of the draft, its corpus and its checkpoint.")],
    target: Annotated[str, typer.Option(help="The model to draft for.")] = DEFAULT_MODEL,
    layers: Annotated[
        str | None, typer.Option(help="Target layers to start from, such as 0,1,2,29.", show_default="0,1,2,last")
    ] = None,
    init: Annotated[
        str | None,
        typer.Option(help="A draft of this target to start from: a folder or default.", show_default="its layers"),
    ] = None,
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
    minutes: Annotated[float, typer.Option(help="Training time; fixes the steps once a few are timed.")] = 10.0,
    tokens: Annotated[int, typer.Option(help="Tokens to learn from, repeats counted; 0: --minutes decides.")] = 0,
    learning_rate: Annotated[float, typer.Option(help="Peak of the cosine schedule.")] = 1e-3,
    batch_rows: Annotated[int, typer.Option(help="Texts in a training step.")] = 8,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(help="Precision of matrix products; auto: what is fast here."),
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the texts and of their order.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the folder's checkpoint.")] = False,
    evaluation_rows: Annotated[int, typer.Option(help="Held-out texts of each temperature in the tables.")] = 8,
    **flags: object,
) -> None:
    """Distil a small draft model from a target, with text that the target writes itself."""
    need_engine("train draft")
    require(minutes > 0, "minutes", minutes, "above 0")
    require(evaluation_rows >= 1, "evaluation_rows", evaluation_rows, "at least 1")
    chosen = _layer_numbers(layers)
    engine = load_config(EngineSettings, None, flags)
    from paceline.models.resolve import resolve_draft
    from paceline.train import distill
    from paceline.train import make_draft as command
    from paceline.train.teacher import Loss
    from paceline.train.writing import GenerationRecipe, parse_temperature_mix

    mix = parse_temperature_mix(temperature_mix)
    wanted = command.TrainDraft(
        target=target,
        out=out,
        data=data,
        self_generate=self_generate,
        layers=chosen,
        init=None if init is None else Path(resolve_draft(init, target)),
        draft_vocab=draft_vocab,
        generation=GenerationRecipe(seed=seed, max_length=max_length, temperature_mix=mix),
        recipe=distill.TrainRecipe(
            loss=Loss(loss),
            tokens=tokens,
            minutes=minutes,
            learning_rate=learning_rate,
            batch_rows=batch_rows,
            seed=seed,
            dtype=distill.fast_dtype(engine.device) if dtype == "auto" else dtype,
        ),
        resume=resume,
        evaluation_rows=evaluation_rows,
        engine=engine,
    )
    command.train_draft(wanted, Console(soft_wrap=True))
    typer.echo(f"use it: paceline serve {target} --drafter model:{out}")


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
    from paceline.train import measure

    engine = load_config(EngineSettings, None, flags)
    wanted = measure.MeasureDrafts(tuple(draft), data, target, held_out, rows, report, engine)
    measure.measure_drafts(wanted, Console(soft_wrap=True))


@train.command("pack", epilog=example("paceline train pack --draft draft --out shipped --weights int8"))
def pack_draft(
    draft: Annotated[Path, typer.Option(help="The draft's folder.")],
    out: Annotated[Path, typer.Option(help="Folder of the copy.")],
    weights: Annotated[Literal["float16", "int8"], typer.Option(help="int8: one scale per row, half size.")] = "int8",
) -> None:
    """Copy a draft to be shipped: small, without the work folder, its files' SHA-256 in the manifest."""
    need_engine("train pack")
    from paceline.train import checkpoint, packing

    manifest = checkpoint.pack_draft(draft, out, packing.WeightFormat(weights))
    for name, digest in manifest.files.items():
        typer.echo(f"{digest}  {out / name}")


def _layer_numbers(listed: str | None) -> tuple[int, ...]:
    if listed is None:
        return ()
    parts = listed.split(",")
    require(all(part.strip().isdecimal() for part in parts), "layers", listed, "numbers with commas between")
    return tuple(int(part) for part in parts)
