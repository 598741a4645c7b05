"""Command-line options made from the settings types of `paceline.runtime.config`.

A field's name, default, bounds and description are its flag's; nested settings
flatten, so `server.host` is `--host`. A flag that is not given leaves the
setting to its variable, else to the TOML file, else to the default.

The settings that a program's environment gives.

A setting's variable is the program's prefix and the key in capitals, with two underscores for the dot:
`engine.threads` of the target service is `PACELINE_TARGET_ENGINE__THREADS`. A variable with the prefix that names
no setting is refused, like an unknown key of a file: a setting that is misspelt would silently keep its default.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from paceline.protocol.errors import InvalidInput
from paceline.runtime.config import Config
from paceline.runtime.fields import Setting, every_setting, variable_of
from paceline.runtime.sources import SourcedConfig, SourcedValue, load

FILE = "config"
"""`<PREFIX>CONFIG` names the file, as `--config` does."""
_LINK = re.compile(r"(tcp|udp|sctp)://")


def settings_from(
    environment: Mapping[str, str], settings: Iterable[Setting], prefix: str, other_variables: Collection[str] = ()
) -> dict[str, SourcedValue]:
    """The settings that variables set, by dotted key; an empty variable sets nothing.

    The values of a list stand between blanks. Any other value is text, which the setting's type parses.

    Args:
        environment: the process's.
        settings: of the program.
        prefix: of its variables.
        other_variables: names of further variables that mean something.

    Raises:
        InvalidInput: a variable that begins with the prefix and names no setting.
    """
    by_name = {setting.variable: setting for setting in settings}
    values: dict[str, SourcedValue] = {}
    for name in of_program(environment, prefix):
        setting, text = by_name.get(name), environment[name]
        if setting is not None:
            if text:
                values[setting.key] = SourcedValue(text.split() if setting.is_list else text, name)
        elif name not in other_variables and name != variable_of(prefix, FILE):
            raise InvalidInput.of("variable", name, _nearest(name, by_name))
    return values


def of_program(environment: Mapping[str, str], prefix: str) -> list[str]:
    """The variables that are meant for a program.

    Kubernetes sets variables in every container for each Service of the namespace: for `paceline-target` they are
    `PACELINE_TARGET_PORT=tcp://…`, `PACELINE_TARGET_SERVICE_HOST` and more. These are left out.
    """
    ports = (name for name, value in environment.items() if name.endswith("_PORT") and _LINK.match(value))
    links = tuple(link for port in ports for link in (port, f"{port.removesuffix('PORT')}SERVICE_"))
    return sorted(name for name in environment if name.startswith(prefix) and not name.startswith(links))


def _nearest(name: str, names: Collection[str]) -> str:
    near = difflib.get_close_matches(name, names, 1, cutoff=0.0)
    return f"the name of a setting, such as {near[0]}" if near else "left out: there is no such setting"


Callback = Callable[..., Any]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        help="TOML file. Variables override it, flags override both; <PREFIX>CONFIG names it too.",
        allow_from_autoenv=False,
    ),
]


def takes_settings(
    kind: type[BaseModel], *, only: Collection[str] | None = None, without: Collection[str] = ()
) -> Callable[[Callback], Callback]:
    """Give a command the flags of a settings type.

    The command's `**flags` become those options; it is called with the dotted
    keys of the flags that were given. `only` and `without` choose by dotted key.
    """

    def decorate(command: Callback) -> Callback:
        candidates = [setting for setting in every_setting(kind) if setting.flag and setting.key not in without]
        settings = [setting for setting in candidates if only is None or setting.key in only]
        signature = inspect.signature(command, eval_str=True)
        own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        own = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]

        @functools.wraps(command)
        def call(**arguments: object) -> Any:
            keys = {setting.flag: setting.key for setting in settings}
            flags = {key: arguments.pop(flag) for flag, key in keys.items()}
            return command(**arguments, **{key: value for key, value in flags.items() if value not in (None, [])})

        parameters = [*own, *(_parameter(setting) for setting in settings)]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by inspect
        call.__annotations__ = {}
        return call

    return decorate


def gather(
    kind: type[Config],
    file: Path | None,
    flags: Mapping[str, object],
    environment: Mapping[str, str],
    other_variables: Collection[str] = (),
) -> SourcedConfig[Config]:
    """A program's settings: flags, which override variables, which override the file.

    Args:
        kind: the configuration.
        file: None: the environment may name one.
        flags: by dotted key; None was not given.
        environment: the process's.
        other_variables: names of variables with the program's prefix that are no settings.

    Raises:
        InvalidInput: naming the key or variable, its value, the limit and what gave it.
    """
    settings = every_setting(kind)
    overrides = settings_from(environment, settings, kind.variables, other_variables)
    names = {setting.key: setting.flag_name for setting in settings}
    overrides |= {key: SourcedValue(value, names.get(key, key)) for key, value in flags.items() if value is not None}
    name = environment.get(variable_of(kind.variables, FILE))
    return load(kind, file or (Path(name) if name else None), overrides)


def parse_config(kind: type[Config], doc: str) -> Config:
    """Read a process's command line and environment. `--help` ends the process.

    Args:
        kind: the configuration.
        doc: the help page's first lines.

    Raises:
        InvalidInput: an unknown flag or variable, or a value that is not what its setting takes.
    """
    return parse(kind, doc, sys.argv[1:], os.environ).config


def parse(kind: type[Config], doc: str, args: Sequence[str], environment: Mapping[str, str]) -> SourcedConfig[Config]:
    """As `parse_config`, of any command line and environment."""

    @takes_settings(kind)
    def from_flags(config: ConfigFile = None, **flags: object) -> SourcedConfig[Config]:
        return gather(kind, config, flags, environment)

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=doc)(from_flags)
    try:
        outcome = app(list(args), standalone_mode=False)
    except typer.TyperException as error:
        raise InvalidInput(usage_error(error, args)) from None
    if not isinstance(outcome, SourcedConfig):
        sys.exit(outcome)
    return outcome


def usage_error(error: typer.TyperException, args: Sequence[str]) -> str:
    """The error's message, with the value that was given: typer names the option alone."""
    message = error.format_message()
    options = set(getattr(getattr(error, "param", None), "opts", ()))
    for name, value in zip(args, [*args[1:], ""], strict=True):
        option, equals, inline = name.partition("=")
        if option in options:
            return f"{message} (given: {(inline if equals else value)!r})"
    return message


def _parameter(setting: Setting) -> inspect.Parameter:
    """The parameter that typer makes an option of. Its default, None, stands for a flag that is not on the line."""
    both = f"{setting.flag_name}/--no-{setting.flag_name[2:]}" if setting.annotation is bool else setting.flag_name
    names = (both,) if setting.short is None else (both, setting.short)
    # Where a setting has a variable, `gather` reads it, and knows it from a flag.
    option = typer.Option(
        *names,
        help=f"{setting.help} Variable {setting.variable}." if setting.variable else setting.help,
        show_default=_default_text(setting.default),
        allow_from_autoenv=not setting.variable,
    )
    annotation = list[str] if setting.is_list else setting.annotation
    return inspect.Parameter(
        setting.flag, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[annotation | None, option]
    )


def _default_text(default: object) -> str | bool:
    """The text of a default on the help page; False: none, where the description explains what unset means."""
    if default is None or default == "":
        return False
    if isinstance(default, bool):
        return "yes" if default else "no"
    if isinstance(default, tuple):
        return ", ".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)
