"""`paceline trace`: a request's time, round by round, in the terminal or as a file for Perfetto.

In the terminal a round is a line with a bar in the colours of its parts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from paceline.cli.app import app
from paceline.cli.request_options import OneRequest
from paceline.cli.support import example
from paceline.protocol.errors import InvalidInput, require
from paceline.protocol.records import RoundRecord
from paceline.runtime.options import takes_settings
from paceline.timeline.layout import PlacedRound, chrome_trace, place_rounds
from paceline.timeline.saved import read_rounds

MOST_ROUNDS = 64
"""Most rounds that are shown; the rest is counted."""
LEAST_WIDTH = 20
_BLANK, _FULL = " ", "█"
PARTS: Mapping[str, tuple[str, str]] = {
    "draft": ("yellow", "waiting for a proposal"),
    "wire": ("blue", "on the wire"),
    "queue": ("magenta", "in the target's queue"),
    "target": ("green", "the target's step"),
    "accept": ("cyan", "accepting"),
}
"""Each part's colour and meaning, in order of time."""


def gantt(records: Sequence[RoundRecord], width: int) -> Group:
    """The rounds in order; `width` is the terminal's, in characters."""
    rounds = list(place_rounds(records[:MOST_ROUNDS]))
    bar_width = max(LEAST_WIDTH, width - 44)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("round", "start ms", "ms", "tokens", "drafter"):
        table.add_column(column, justify="left" if column == "drafter" else "right", no_wrap=True)
    table.add_column("", no_wrap=True)
    origin = rounds[0].whole.start_ms if rounds else 0.0
    span = max((each.whole.end_ms - origin for each in rounds), default=1.0) or 1.0
    for number, each in enumerate(rounds):
        table.add_row(*_words(number, each), _bar(each, origin, span / bar_width, bar_width))
    rest = len(records) - len(rounds)
    more = [Text(f"… and {rest} more rounds; --out has all of them")] if rest else []
    return Group(table, *more, _legend())


def _words(number: int, round_: PlacedRound) -> tuple[str, ...]:
    record = round_.record
    drafter = record.drafter or "-"
    mark = " hit" if record.cache_hit else " miss" if record.cache_miss else ""
    tokens = f"{record.accepted}/{record.proposed}+1" if record.proposed else "1"
    drafter_text = f"{drafter[:8]}{mark}"
    return str(number), f"{round_.whole.start_ms:.1f}", f"{record.round_ms:.1f}", tokens, drafter_text


def _bar(round_: PlacedRound, origin: float, ms_each: float, width: int) -> Text:
    """Each character shows the part that takes most of its time."""
    start_ms = round_.whole.start_ms - origin
    ends = _part_ends(round_, start_ms)
    bar = Text()
    for column in range(width):
        middle = (column + 0.5) * ms_each
        part = next((name for name, end in ends if middle < end), None) if middle >= start_ms else None
        bar.append(_FULL if part else _BLANK, style=PARTS[part][0] if part else "")
    if not bar.plain.strip():  # shorter than a character
        place = min(width - 1, int(start_ms / ms_each))
        return Text(_BLANK * place) + Text("▏", style=PARTS["target"][0])
    return bar


def _part_ends(round_: PlacedRound, start_ms: float) -> list[tuple[str, float]]:
    record = round_.record
    whole = record.round_ms
    way = record.wire_ms / 2
    step = max(0.0, record.target.service_ms - record.target.queue_ms)
    lengths = (
        ("draft", record.draft_wait_ms),
        ("wire", way),
        ("queue", record.target.queue_ms),
        ("target", step),
        ("wire", way),
        ("accept", record.accept_ms),
    )
    ends, at = [], start_ms
    for name, length in lengths:
        at = min(at + length, start_ms + whole)
        ends.append((name, at))
    return ends


def _legend() -> Text:
    legend = Text()
    for colour, meaning in PARTS.values():
        legend.append("■ ", style=colour).append(f"{meaning}   ")
    return legend


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
        _write_trace(out, records)
    if show or (show is None and out is None):
        console = Console()
        console.print(gantt(records, console.width))


def _write_trace(file: Path, records: Sequence[RoundRecord]) -> None:
    """Write the rounds for Perfetto, and say where."""
    try:
        file.write_text(json.dumps(chrome_trace(records)))
    except OSError as error:
        raise InvalidInput.of("out", str(file), f"a file that can be written ({error.strerror})") from error
    typer.echo(f"trace: {file}, {len(records)} rounds; open it in ui.perfetto.dev", err=True)
