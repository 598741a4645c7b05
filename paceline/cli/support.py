"""What the modules of the `paceline` command share."""

from __future__ import annotations

from importlib import util

from paceline.protocol.errors import PacelineError


def example(*commands: str) -> str:
    """A help page's last lines."""
    return "\n\n".join(["[bold]Example:[/bold]", *(f"[cyan]{command}[/cyan]" for command in commands)])


def split_commas(text: str) -> tuple[str, ...]:
    """The parts of an option between its commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def has_engine() -> bool:
    """Whether this installation can run a model."""
    return all(util.find_spec(package) is not None for package in ("torch", "transformers", "numba"))


def need_engine(command: str) -> None:
    """Refuse a command that this installation is too small for.

    Raises:
        PacelineError: saying what to install.
    """
    if not has_engine():
        raise PacelineError(f"`paceline {command}` needs the engine: pip install 'paceline[engine]'")
