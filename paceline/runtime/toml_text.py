"""Settings as TOML text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from paceline.runtime.fields import Setting
from paceline.runtime.sources import SourcedConfig


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
