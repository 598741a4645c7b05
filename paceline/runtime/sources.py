"""Values from several sources become one checked configuration that knows the source of each.

Settings as TOML text.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from paceline.protocol.errors import InvalidInput
from paceline.protocol.given_files import read_text
from paceline.protocol.proposal import NONE
from paceline.runtime.fields import Setting

ConfigType = TypeVar("ConfigType", bound=BaseModel)
DEFAULT = "default"


@dataclass(frozen=True)
class SourcedValue:
    """A value for one setting, and its source: the name of a flag, a variable or a file; empty: a program."""

    value: object
    source: str = ""


@dataclass(frozen=True)
class SourcedConfig(Generic[ConfigType]):
    """A configuration, and the sources of those settings that are not left to their defaults, by dotted key."""

    config: ConfigType
    sources: Mapping[str, str]

    def source_of(self, key: str) -> str:
        """The source of a setting, or of the section that it is in."""
        return next((self.sources[each] for each in _upwards(key) if each in self.sources), DEFAULT)


def load(
    kind: type[ConfigType], file: Path | None, overrides: Mapping[str, SourcedValue]
) -> SourcedConfig[ConfigType]:
    """Merge a TOML file and what overrides it, by dotted key, into one configuration.

    Raises:
        InvalidInput: naming the key, its value, the limit, and the source.
    """
    values = {} if file is None else _read_toml(file)
    sources = {key: str(file) for key in _dotted_keys(values)}
    try:
        for key, each in overrides.items():
            _set_dotted(values, key.split("."), each.value)
            sources[key] = each.source
        return SourcedConfig(kind.model_validate(values), sources)
    except ValidationError as error:
        raise _with_source(refusal(error), sources) from error
    except InvalidInput as error:
        raise _with_source(error, sources) from error


def refusal(error: ValidationError) -> InvalidInput:
    """The first of pydantic's complaints."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    return InvalidInput.of(key, first["input"], f"valid ({first['msg']})")


def _with_source(error: InvalidInput, sources: Mapping[str, str]) -> InvalidInput:
    """The error with the source of the value; for a part of a value, as an entry of a list, that of the whole."""
    field = error.metadata.get("field", "")
    below = (key for key in sources if key.startswith(f"{field}."))
    source = next((sources[key] for key in (*_upwards(field), *below) if sources.get(key)), "")
    if not source:
        return error
    return InvalidInput(f"{error.message}; given by {source}", metadata={**error.metadata, "source": source})


def _upwards(key: str) -> Iterator[str]:
    """The key, then the keys of the sections that it is in, innermost first."""
    parts = key.split(".")
    yield from (".".join(parts[:length]) for length in range(len(parts), 0, -1))


def _read_toml(file: Path) -> dict[str, object]:
    try:
        return tomllib.loads(read_text("config", file))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidInput.of("config", str(file), f"a readable TOML file ({error})") from error


def _dotted_keys(values: Mapping[str, object], path: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _dotted_keys(value, f"{path}{name}.")
        else:
            yield path + name


def _set_dotted(values: dict[str, object], keys: list[str], value: object) -> None:
    for key in keys[:-1]:
        if values.get(key, NONE) == NONE:
            values[key] = {}
        inner = values[key]
        if not isinstance(inner, dict):
            raise InvalidInput.of(key, inner, "a table")
        values = inner
    values[keys[-1]] = value


def toml_value(value: object) -> str:
    """A value in TOML, which is as in JSON but for a character that JSON leaves unescaped."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(each) for each in value)}]"
    plain = str(value) if isinstance(value, Path) else value
    return json.dumps(plain, ensure_ascii=False).replace("\x7f", "\\u007f")


def config_text(configuration: SourcedConfig[Any], settings: Iterable[Setting]) -> str:
    """A whole configuration, each setting with its source. Unset settings are comments, since TOML has no null."""

    def section_of(setting: Setting) -> str:
        return setting.key.rpartition(".")[0]

    lines: list[str] = []
    for section, members in groupby(sorted(settings, key=section_of), section_of):
        setting_lines = list(_lines(configuration, members))
        unset = all(line.startswith("#") for line in setting_lines)
        lines += ["", f"# [{section}]" if unset else f"[{section}]"] if section else []
        lines += setting_lines
    return "\n".join(lines) + "\n"


def _lines(configuration: SourcedConfig[Any], settings: Iterable[Setting]) -> Iterator[str]:
    for setting in settings:
        value, name = value_of(configuration.config, setting.key), setting.key.rpartition(".")[2]
        source = configuration.source_of(setting.key)
        yield f"# {name} is unset" if value is None else f"{name} = {toml_value(value)}  # {source}"


def value_of(config: BaseModel, key: str) -> object:
    """The value of a setting; None also where its whole section is unset."""
    value: object = config
    for name in key.split("."):
        value = getattr(value, name, None)
    return value
