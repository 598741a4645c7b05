"""What a parameter's text means where a template writes arguments one by one, without JSON's quotes.

Strings are written as they are, everything else as JSON; Jinja writes `True`, `False` and `None`. So the schema tells
which is meant: text of a parameter that may be a string alone is that string; any other is JSON if its type fits,
else a string.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

STRING = frozenset({"string"})
_WORDS = {"True": True, "False": False, "None": None}
_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", list: "array"}


def types_of(schema: object) -> frozenset[str]:
    """JSON types that a schema allows, as far as it says so itself; empty: any may be meant."""
    if not isinstance(schema, Mapping):
        return frozenset()
    given = schema.get("type")
    if given is not None:
        named = [given] if isinstance(given, str) else given
        return frozenset(each for each in _list(named) if isinstance(each, str))
    if "const" in schema or "enum" in schema:
        return frozenset(map(_type_of, _list(schema["enum"]) if "enum" in schema else [schema["const"]]))
    for union in ("anyOf", "oneOf"):
        parts = [types_of(part) for part in _list(schema.get(union))]
        if parts and all(parts):
            return frozenset[str]().union(*parts)
    return frozenset()


def json_of(text: str, types: frozenset[str]) -> str:
    """A parameter's text as JSON."""
    try:
        value = _WORDS[text.strip()] if text.strip() in _WORDS else json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = _type_of(value)
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    if not fits or types == STRING:
        return json.dumps(text, ensure_ascii=False)
    return json.dumps(value) if text.strip() in _WORDS else text.strip()


def parameters_of(schema: object) -> Mapping[str, Any]:
    """The schemas of a function's parameters."""
    given = schema.get("properties") if isinstance(schema, Mapping) else None
    return given if isinstance(given, Mapping) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _type_of(value: object) -> str:
    return _NAMES.get(type(value), "object")


def _refuse(word: str) -> object:
    raise ValueError(f"{word} is no JSON")
