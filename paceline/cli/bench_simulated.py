"""`paceline bench overlap` and `paceline bench load`: options read and checked, progress shown, reports written."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paceline.cli.bench import REPORTS, Name, Out, bench, count_of, listed, number_of, progress_bar
from paceline.cli.support import example, need_engine


@bench.command(
    epilog=example(
        "paceline bench overlap --only efficiency",
        "paceline bench overlap --only gain --verify-ms 30 --add",
    )
)
def overlap(
    only: Annotated[
        str, typer.Option(help="efficiency, gain, delay, with commas between.")
    ] = "efficiency,gain,delay",
    verify_ms: Annotated[str, typer.Option(help="T_verify: 30, 11.45.")] = "30,11.45",
    acceptance: Annotated[str, typer.Option(help="Of gain and delay: 0.6, 0.8, 0.9, 0.95.")] = "0.6,0.8,0.9,0.95",
    generations: Annotated[int, typer.Option(help="Generations, or pairs, of a cell; not of delay.")] = 9,
    tokens: Annotated[int, typer.Option(help="Tokens of a generation; not of delay.")] = 256,
    add: Annotated[bool, typer.Option("--add", help="Keep what else today's report holds.")] = False,
    out: Out = REPORTS,
    name: Name = "overlap",
) -> None:
    """Drafting behind verification on timed models: efficiency, on over off, and services at a distance."""
    need_engine("bench overlap")
    from dataclasses import asdict

    from benchmarks.reporting.files import report_file, write_report
    from benchmarks.simulated.overlap import OverlapPlan, Results, run

    plan = OverlapPlan(
        grids=listed(only),
        verify_ms=tuple(number_of("verify_ms", text) for text in listed(verify_ms)),
        acceptances=tuple(number_of("acceptance", text) for text in listed(acceptance)),
        generations=generations,
        tokens=tokens,
    )
    with _measuring("cells", len(plan)) as (folder, advance):
        found = run(plan, folder, advance)
    held = Results.load(report_file(out, name, "json")) if add else Results()
    results = held.updated(found)
    report = write_report(out, name, asdict(results), results.markdown(), results.plots())
    typer.echo(f"report: {report}")


@bench.command(epilog=example("paceline bench load", "paceline bench load --sessions 8,64 --waves 5"))
def load(
    sessions: Annotated[str, typer.Option(help="Concurrent requests, with commas between.")] = "1,2,4,8,16,32,64",
    waves: Annotated[int, typer.Option(help="Of each mode at each concurrency, after one that isn't counted.")] = 9,
    tokens: Annotated[int, typer.Option(help="Tokens of a request.")] = 128,
    out: Out = REPORTS,
    name: Name = "load",
) -> None:
    """Speculation on, off and auto under concurrency, on timed models whose steps grow with their rows."""
    need_engine("bench load")
    from dataclasses import asdict

    from benchmarks.reporting.environment import describe
    from benchmarks.reporting.files import write_report
    from benchmarks.simulated.load import LoadPlan, run

    plan = LoadPlan(tuple(count_of("sessions", text) for text in listed(sessions)), waves, tokens)
    with _measuring("concurrencies", len(plan)) as (folder, advance):
        results = asyncio.run(run(plan, folder, advance))
    facts = describe() | plan.facts
    report = write_report(out, name, {"facts": facts} | asdict(results), results.markdown(facts), results.plots())
    typer.echo(f"report: {report}")


@contextmanager
def _measuring(what: str, total: int) -> Iterator[tuple[Path, Callable[[str], None]]]:
    """A folder for the services' files, and a progress bar's advance."""
    console = Console(stderr=True, soft_wrap=True)
    with (
        tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder,
        progress_bar(console, what, total) as advance,
    ):
        yield Path(folder), advance


__all__ = ["bench"]
