"""What a run shows while it measures, and where its services keep their files."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Advance = Callable[[str], None]
"""Told of each thing that is done."""


def stderr_console() -> Console:
    """Where progress is shown."""
    return Console(stderr=True, soft_wrap=True)


@contextmanager
def progress_bar(console: Console, what: str, total: int) -> Iterator[Advance]:
    """A bar of `total` steps; call what it yields after each, with what was done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, advance=1, description=done)


@contextmanager
def measuring(what: str, total: int) -> Iterator[tuple[Path, Advance]]:
    """A folder for the services' files, and a progress bar's advance."""
    with (
        tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder,
        progress_bar(stderr_console(), what, total) as advance,
    ):
        yield Path(folder), advance
