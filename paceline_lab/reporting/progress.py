"""The progress that a run shows while it measures, and the folder of its services' files."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Advance = Callable[[str], None]
"""Called after each step, with its name."""
LOG_SECONDS = 60.0
"""Between two lines of a run whose progress no terminal shows."""


def stderr_console() -> Console:
    """Return the console that shows progress."""
    return Console(stderr=True, soft_wrap=True)


@contextmanager
def progress_bar(console: Console, what: str, total: int) -> Iterator[Advance]:
    """Show a bar of `total` steps, or lines where there is no terminal; call what it yields after each step."""
    if not console.is_terminal:
        yield _lines(console, what, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, advance=1, description=done)


def _lines(console: Console, what: str, total: int) -> Advance:
    """A line a minute and one at the end, for whoever reads the log of a long run."""
    begin_s = shown_s = time.monotonic()
    steps = count(1)

    def advance(step: str) -> None:
        nonlocal shown_s
        number, now_s = next(steps), time.monotonic()
        if number == total or now_s - shown_s >= LOG_SECONDS:
            shown_s = now_s
            console.print(f"{what}: {number} of {total}, {step}, after {now_s - begin_s:.0f} s")

    return advance


@contextmanager
def measuring(what: str, total: int) -> Iterator[tuple[Path, Advance]]:
    """Yield a folder for the services' files, and a progress bar's advance."""
    with (
        tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder,
        progress_bar(stderr_console(), what, total) as advance,
    ):
        yield Path(folder), advance
