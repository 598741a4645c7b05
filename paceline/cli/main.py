"""The `paceline` command.

Bad input gives one line on stderr that names field, value and limit, and exit
code 2. No module here imports the engine before a command needs it, so the base
installation (the client) has every command and says what it lacks.
"""

from __future__ import annotations

from paceline.cli import (  # noqa: F401 - they add commands
    certs,
    doctor,
    explain,
    generate,
    models,
    serve,
    services,
    trace,
)
from paceline.cli.app import app


def main() -> None:
    """Entry point of the `paceline` command."""
    app()


__all__ = ["app", "main"]
