"""The base of all groups of settings: frozen, without unknown keys, its flags named beside its fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, model_validator


@dataclass(frozen=True)
class Flag:
    """The flag of a setting on a command line, where that is not `--its-own-name`.

    Attributes:
        name: the flag's; empty: the setting has none.
        short: a second name.
    """

    name: str | None = None
    short: str | None = None


NO_FLAG = Flag("")
SECTION_FLAG = Flag("the section's own")
"""`--target` gives `target.address`."""


class Settings(BaseModel):
    """A group of settings. Whoever states a part of a section leaves the rest of it as it is."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    variables: ClassVar[str] = ""
    """Prefix of the names of a program's environment variables; empty: the type is a part of others."""
    unused_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of settings of shared parts that a program has no use for: they have no flag and no variable."""

    @model_validator(mode="before")
    @classmethod
    def _within_sections(cls, values: object) -> object:
        """Settings of a section that are left out take the values of the section's default, not those of its type."""
        if not isinstance(values, dict):
            return values
        defaults = {
            name: field.default for name, field in cls.model_fields.items() if isinstance(field.default, Settings)
        }
        sections = {name: values[name] for name in defaults if isinstance(values.get(name), dict)}
        return values | {
            name: defaults[name].model_dump(exclude_unset=True) | value for name, value in sections.items()
        }
