"""Command-line options made from the settings types of `paceline.runtime.config`.

A field's name, default, bounds and description are its flag's; nested settings
flatten, so `server.host` is `--host`. A flag that is not given leaves the
setting to the TOML file or to the default.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from paceline.protocol.errors import InvalidInput
from paceline.runtime.config import NO_FLAG, SECTION_FLAG, Config, Flag, load_config

Callback = Callable[..., Any]
ConfigFile = Annotated[Path | None, typer.Option(help="TOML file; flags override it.")]
LARGE_BITS = 20
"""Bounds above it are shown as powers of two."""
_LIMITS = ("ge", "gt", "le", "lt", "multiple_of")


@dataclass(frozen=True)
class Setting:
    """One setting that has a flag.

    Attributes:
        key: dotted, as `load_config` takes it.
        flag: the flag's name with underscores.
        short: its second name, if it has one.
        annotation: the value's type without None.
    """

    key: str
    flag: str
    short: str | None
    annotation: Any
    default: object
    help: str

    @property
    def parameter(self) -> inspect.Parameter:
        """What typer makes the option of; its own default says that nothing was given."""
        dashed = self.flag.replace("_", "-")
        both = f"--{dashed}/--no-{dashed}" if self.annotation is bool else f"--{dashed}"
        names = (both,) if self.short is None else (both, self.short)
        option = typer.Option(*names, help=self.help, show_default=_shown(self.default))
        annotation = list[str] if get_origin(self.annotation) is tuple else self.annotation
        return inspect.Parameter(
            self.flag, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[annotation | None, option]
        )


def settings_of(
    kind: type[BaseModel], *, only: Collection[str] | None = None, without: Collection[str] = ()
) -> tuple[Setting, ...]:
    """Every setting of a type that has a flag; `only` and `without` choose by dotted key."""
    found = _walk(kind, "", None, _Section())
    return tuple(each for each in found if each.key not in without and (only is None or each.key in only))


def takes_settings(
    kind: type[BaseModel], *, only: Collection[str] | None = None, without: Collection[str] = ()
) -> Callable[[Callback], Callback]:
    """Give a command the flags of a settings type.

    The command's `**flags` become those options; it is called with the dotted
    keys of the flags that were given.
    """

    def decorate(command: Callback) -> Callback:
        settings = settings_of(kind, only=only, without=without)
        signature = inspect.signature(command, eval_str=True)
        own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        own = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]

        @functools.wraps(command)
        def called(**given: object) -> Any:
            keys = {setting.flag: setting.key for setting in settings}
            flags = {key: given.pop(flag) for flag, key in keys.items()}
            return command(**given, **{key: value for key, value in flags.items() if value not in (None, [])})

        parameters = [*own, *(setting.parameter for setting in settings)]
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by inspect
        called.__annotations__ = {}
        return called

    return decorate


def parse_config(kind: type[Config], doc: str, without: Collection[str] = ()) -> Config:
    """Read a process's command line: `--config`, and the flags of its configuration. `--help` ends the process.

    Args:
        kind: the configuration.
        doc: the help page's first lines.
        without: dotted keys that get no flag.

    Raises:
        InvalidInput: an unknown flag, or a value that is not what its setting takes.
    """

    @takes_settings(kind, without=without)
    def load(config: ConfigFile = None, **flags: object) -> Config:
        return load_config(kind, config, flags)

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=doc)(load)
    try:
        loaded = app(standalone_mode=False)
    except typer.TyperException as error:
        raise InvalidInput(usage_error(error, sys.argv[1:])) from None
    if not isinstance(loaded, kind):
        sys.exit(loaded)
    return loaded


def usage_error(error: typer.TyperException, args: Sequence[str]) -> str:
    """The error's message, with the value that was given: typer names the option alone."""
    message = error.format_message()
    options = set(getattr(getattr(error, "param", None), "opts", ()))
    for name, value in zip(args, [*args[1:], ""], strict=True):
        option, equals, inline = name.partition("=")
        if option in options:
            return f"{message} (given: {(inline if equals else value)!r})"
    return message


class _Section(NamedTuple):
    """Where nested settings hang: the field's name, and its description for what bears its name."""

    name: str = ""
    description: str | None = None


def _walk(kind: type[BaseModel], prefix: str, defaults: object, section: _Section) -> Iterator[Setting]:
    for name, field in kind.model_fields.items():
        default = getattr(defaults, name, None if field.is_required() else field.default)
        annotation = _without_none(field.annotation)
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from _walk(annotation, f"{prefix}{name}.", default, _Section(name, field.description))
            continue
        flag = next((each for each in field.metadata if isinstance(each, Flag)), Flag())
        if flag != NO_FLAG:
            of_section = flag == SECTION_FLAG
            description = (section.description if of_section else None) or field.description or ""
            yield Setting(
                key=prefix + name,
                flag=section.name if of_section else flag.name or name,
                short=flag.short,
                annotation=annotation,
                default=default,
                help=" ".join(part for part in (description, _bounds(field)) if part),
            )


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) not in (Union, UnionType):
        return annotation
    (only,) = (each for each in get_args(annotation) if each is not NoneType)
    return only


def _bounds(field: FieldInfo) -> str:
    """The field's limits as a sentence, such as "In (0, 1]."; empty: it has no lower one."""
    limits = {name: getattr(each, name) for each in field.metadata for name in _LIMITS if hasattr(each, name)}
    low = next((sign + _number(limits[name]) for name, sign in (("ge", "["), ("gt", "(")) if name in limits), None)
    high = next((_number(limits[name]) + sign for name, sign in (("le", "]"), ("lt", ")")) if name in limits), None)
    if low is None:
        return ""
    if high is None:
        return f"{'At least' if 'ge' in limits else 'Above'} {low[1:]}."
    step = f", a multiple of {limits['multiple_of']}" if "multiple_of" in limits else ""
    return f"In {low}, {high}{step}."


def _number(value: float) -> str:
    large = isinstance(value, int) and value.bit_length() > LARGE_BITS and value & (value - 1) == 0
    return f"2^{int(value).bit_length() - 1}" if large else f"{value:g}" if isinstance(value, float) else str(value)


def _shown(default: object) -> str | bool:
    """How help shows a default; False: not at all, since unset is what its description explains."""
    if default is None or default == "":
        return False
    if isinstance(default, bool):
        return "yes" if default else "no"
    if isinstance(default, tuple):
        return ", ".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)
