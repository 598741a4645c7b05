"""Commands of other packages, found by entry points and loaded when they are called.

A distribution registers a `typer.Typer` under the group `paceline.commands`, by
the name of its command. So this package imports none of those that build on it,
and `paceline serve` loads no benchmark.
"""

from __future__ import annotations

from functools import cache
from importlib import metadata
from typing import Any

import typer

from paceline.protocol.errors import PacelineError

GROUP = "paceline.commands"


def extension_names() -> list[str]:
    """The registered commands, in alphabetical order."""
    return sorted(_entries())


def load_extension(name: str) -> Any:
    """A registered command, or None where nobody registered the name.

    Raises:
        PacelineError: naming the command, its distribution and what went wrong when it was imported.
    """
    entry = _entries().get(name)
    if entry is None:
        return None
    holder = typer.Typer(rich_markup_mode="rich", add_completion=False)
    try:
        holder.add_typer(entry.load())
    except ImportError as error:
        distribution = entry.dist.name if entry.dist else "an unknown distribution"
        raise PacelineError(f"`paceline {name}` of {distribution} can't be loaded: {error}") from error
    return typer.main.get_group(holder).commands[name]


@cache
def _entries() -> dict[str, metadata.EntryPoint]:
    return {entry.name: entry for entry in metadata.entry_points(group=GROUP)}
