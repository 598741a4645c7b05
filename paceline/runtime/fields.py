"""The settings of a configuration type, one by one: key, flag, variable, default, and limits as a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from paceline.runtime.settings import NO_FLAG, SECTION_FLAG, Flag

KEY_SEPARATOR = "__"
"""Stands in a variable's name where a key has a dot. Names that an orchestrator makes of services lack it."""
LARGE_BITS = 20
"""Bounds above it are shown as powers of two."""
_LIMITS = ("ge", "gt", "le", "lt", "multiple_of")


@dataclass(frozen=True)
class Setting:
    """One setting, and the names by which it is given.

    Attributes:
        key: dotted, as in a file.
        flag: the flag's name with underscores; empty: it has none.
        short: the flag's second name, if it has one.
        variable: of the environment; empty: there is none, the type is no program's whole configuration.
        annotation: the value's type without None.
    """

    key: str
    flag: str
    short: str | None
    variable: str
    annotation: Any
    default: object
    help: str

    @property
    def flag_name(self) -> str:
        """As it is typed; empty: there is none."""
        return f"--{self.flag.replace('_', '-')}" if self.flag else ""

    @property
    def is_list(self) -> bool:
        """Whether it takes several values."""
        return get_origin(self.annotation) is tuple


def every_setting(kind: type[BaseModel]) -> tuple[Setting, ...]:
    """All settings of a type, but those that its program has no use for."""
    prefix, unused_keys = getattr(kind, "variables", ""), getattr(kind, "unused_keys", ())
    return tuple(each for each in _walk(kind, "", None, _Section(), prefix) if each.key not in unused_keys)


class _Section(NamedTuple):
    """The field that nested settings belong to: its name, and its description for a flag of that name."""

    name: str = ""
    description: str | None = None


def _walk(kind: type[BaseModel], path: str, defaults: object, section: _Section, variables: str) -> Iterator[Setting]:
    for name, field in kind.model_fields.items():
        default = getattr(defaults, name, None if field.is_required() else field.default)
        annotation = _without_none(field.annotation)
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from _walk(annotation, f"{path}{name}.", default, _Section(name, field.description), variables)
            continue
        flag = next((each for each in field.metadata if isinstance(each, Flag)), Flag())
        of_section = flag == SECTION_FLAG
        description = (section.description if of_section else None) or field.description or ""
        key = path + name
        yield Setting(
            key=key,
            flag="" if flag == NO_FLAG else section.name if of_section else flag.name or name,
            short=flag.short,
            variable=variable_of(variables, key) if variables else "",
            annotation=annotation,
            default=default,
            help=" ".join(part for part in (description, _bounds(field)) if part),
        )


def variable_of(prefix: str, key: str) -> str:
    """The variable that gives the setting with a dotted key."""
    return prefix + key.upper().replace(".", KEY_SEPARATOR)


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) not in (Union, UnionType):
        return annotation
    some = tuple(each for each in get_args(annotation) if each is not NoneType)
    return some[0] if len(some) == 1 else Union[some]  # noqa: UP007 - made of values


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
