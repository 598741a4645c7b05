"""Attacks by number: each is one function that tries something and says what it saw, or that it did not hold."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

TIME_LIMIT_S = 300.0
Run = Callable[[Path], Awaitable[str]]
"""Tries an attack with services that it starts in a folder of its own; returns a figure. A failed assertion says that
it did not hold."""


@dataclass(frozen=True)
class Attack:
    """One attack: its number, what is tried, and how."""

    number: str
    what: str
    run: Run


@dataclass(frozen=True)
class Outcome:
    """What became of an attack; `figure` says why where it did not hold."""

    attack: Attack
    held: bool
    figure: str
    seconds: float


ATTACKS: list[Attack] = []


def attack(number: str, what: str) -> Callable[[Run], Run]:
    """Enter a function in the list of attacks."""

    def enter(run: Run) -> Run:
        ATTACKS.append(Attack(number, what, run))
        return run

    return enter


def chosen(numbers: Iterable[str]) -> list[Attack]:
    """The attacks with these numbers, all where there are none, in the order of their numbers."""
    names = set(numbers)
    matches = [each for each in ATTACKS if not names or each.number in names]
    return sorted(matches, key=lambda each: int(each.number[1:]))


async def tried(each: Attack, folder: Path) -> Outcome:
    """Try an attack; whatever goes wrong counts as not held."""
    started = time.monotonic()
    try:
        async with asyncio.timeout(TIME_LIMIT_S):
            held, figure = True, await each.run(folder)
    except Exception as error:  # noqa: BLE001  an attack that breaks something else did not hold either
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        held, figure = False, f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]
    return Outcome(each, held, figure, time.monotonic() - started)


def table(outcomes: Iterable[Outcome]) -> str:
    """The outcomes as Markdown."""
    rows = ["| | what was tried | held | figure |", "|---|---|---|---|"]
    for each in outcomes:
        cells = (each.attack.number, each.attack.what, "yes" if each.held else "**no**", each.figure)
        rows.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(rows)
