"""What a parameter's text means where a template writes arguments one by one, without JSON's quotes.

Strings are written as they are, everything else as JSON; Jinja writes `True`, `False` and `None`. So the schema
decides. The text of a parameter that can only be a string is that string. Any other text is JSON if its type fits,
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
    """Return the JSON types that a schema allows, as far as it says so itself; empty: any."""
    if not isinstance(schema, Mapping):
        return frozenset()
    types = schema.get("type")
    if types is not None:
        names = [types] if isinstance(types, str) else _list(types)
        return frozenset(name for name in names if isinstance(name, str))
    if "const" in schema or "enum" in schema:
        return frozenset(map(_type_of, _list(schema["enum"]) if "enum" in schema else [schema["const"]]))
    for union in ("anyOf", "oneOf"):
        parts = [types_of(part) for part in _list(schema.get(union))]
        if parts and all(parts):
            return frozenset[str]().union(*parts)
    return frozenset()


def json_of(text: str, types: frozenset[str]) -> str:
    """Return a parameter's text as JSON."""
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
    """Return the schemas of a function's parameters, by name."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _type_of(value: object) -> str:
    return _NAMES.get(type(value), "object")


def _refuse(word: str) -> object:
    raise ValueError(f"{word} is no JSON")
