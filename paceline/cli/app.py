"""The `paceline` command itself: one line for every error, whatever the command.

Commands of other packages, found by entry points and loaded when they are called.

A distribution registers a `typer.Typer` under the group `paceline.commands`, by
the name of its command. So this package imports none of those that build on it,
and `paceline serve` loads no benchmark.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from paceline.cli.config import config
from paceline.cli.keys import keys
from paceline.protocol.errors import InvalidInput, PacelineError
from paceline.runtime.logs import one_line
from paceline.runtime.options import usage_error

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


EXIT_ERROR = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


class _Commands(TyperGroup):
    """The package's own commands, then those that others register.

    Every error is printed as one line; typer's frames would hide the value among box characters.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        own = super().list_commands(ctx)
        return own + [name for name in extension_names() if name not in own]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, cmd_name) or load_extension(cmd_name)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except typer.TyperException as error:
            _fail(usage_error(error, sys.argv[1:] if args is None else args), error.exit_code)
        except InvalidInput as error:
            _fail(error.message, EXIT_BAD_INPUT)
        except PacelineError as error:
            _fail(error.message, EXIT_ERROR)
        except (KeyboardInterrupt, typer.Abort):
            sys.exit(EXIT_INTERRUPTED)
        sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> NoReturn:
    if message:  # none where a group without a command has shown its help
        # The message may be a service's, and a terminal must not take it for control characters.
        text = "\n".join(one_line(line) for line in message.split("\n"))
        typer.echo(f"paceline: error: {text}", err=True)
    sys.exit(code)


app = typer.Typer(
    cls=_Commands,
    context_settings={"auto_envvar_prefix": "PACELINE", "help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Speculative decoding as separate services: the text is exactly the target model's.",
)
app.add_typer(config, name="config")
app.add_typer(keys, name="keys")


def _show_version(show: bool) -> None:
    if show:
        typer.echo(f"paceline {metadata.version('paceline')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
