"""The progress that a run shows while it measures, and the folder of its services' files."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Advance = Callable[[str], None]
"""Called after each step, with its name."""


def stderr_console() -> Console:
    """Return the console that shows progress."""
    return Console(stderr=True, soft_wrap=True)


@contextmanager
def progress_bar(console: Console, what: str, total: int) -> Iterator[Advance]:
    """Show a bar of `total` steps; call what it yields after each step, with the step's name."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, advance=1, description=done)


@contextmanager
def measuring(what: str, total: int) -> Iterator[tuple[Path, Advance]]:
    """Yield a folder for the services' files, and a progress bar's advance."""
    with (
        tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder,
        progress_bar(stderr_console(), what, total) as advance,
    ):
        yield Path(folder), advance
