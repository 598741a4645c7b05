"""`paceline trace`: a request's time, round by round, in the terminal or as a file for Perfetto."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from paceline.cli.app import app
from paceline.cli.gantt import gantt
from paceline.cli.request_options import OneRequest
from paceline.cli.support import example, write_trace
from paceline.protocol.errors import require
from paceline.protocol.records import RoundRecord
from paceline.runtime.options import takes_settings
from paceline.timeline.saved import read_rounds


@app.command(
    epilog=example(
        'paceline trace --chat "Name three rivers."',
        'paceline trace --prompt "Once upon a time" --out trace.json   # open it in ui.perfetto.dev',
        "paceline trace --request response.json --out trace.json",
    )
)
@takes_settings(OneRequest)
def trace(
    request: Annotated[
        Path | None, typer.Option(help="A saved response with rounds, of HTTP or of generate --json --rounds.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Run this: plain text to go on from.")] = None,
    chat: Annotated[str | None, typer.Option(help="Run this: a user message.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write a trace for Perfetto.", show_default="none")] = None,
    show: Annotated[
        bool | None, typer.Option("--gantt/--no-gantt", help="Show the rounds here.", show_default="without --out")
    ] = None,
    **flags: Any,
) -> None:
    """Show the rounds of a saved request, or of one that is run now, on a time axis."""
    count = sum(value is not None for value in (request, prompt, chat))
    require(count == 1, "inputs given", count, "exactly 1 of --request, --prompt and --chat")
    if request is not None:
        records: Sequence[RoundRecord] = read_rounds(request)
    else:
        records = OneRequest(**flags).run(prompt, chat).stats.records
    if out is not None:
        write_trace(out, records)
    if show or (show is None and out is None):
        console = Console()
        console.print(gantt(records, console.width))
