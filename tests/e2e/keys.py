"""Key files of coordinators."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from paceline.access.keys import ApiKey, ApiKeys, KeyLimits, hash_of, save_keys


def write_keys(file: Path, keys: Mapping[str, str], limits: Mapping[str, KeyLimits] | None = None) -> None:
    """Write keys by their names; those without limits have none."""
    own, none = limits or {}, KeyLimits()
    named = (ApiKey(name=name, sha256=hash_of(key), limits=own.get(name, none)) for name, key in keys.items())
    save_keys(ApiKeys(keys=tuple(named)), file)
