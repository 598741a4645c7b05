"""Grammars that attack by their shape: nesting, repeats, alternations, classes, recursion, references."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paceline.protocol.sampling import Grammar, GrammarKind


def _regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def _lark(text: str) -> Grammar:
    return Grammar(GrammarKind.LARK, text)


def _schema(value: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, value if isinstance(value, str) else json.dumps(value))


def _to(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


def _pattern(text: str) -> dict[str, str]:
    return {"type": "string", "pattern": text}


_WORDS = [f"{number * 2_654_435_761 % (1 << 32):x}" for number in range(6_000)]
_DEEP_SCHEMA = '{"items":' * 900 + "{}" + "}" * 900
_CHOICES = {
    f"f{level}": {"anyOf": [{"$ref": f"#/$defs/f{level + 1}"}, {"type": "object", "additionalProperties": False}] * 4}
    for level in range(40)
}
SHAPES: Mapping[str, Grammar] = {
    "nested stars": _regex("(" * 2_000 + "a" + ")*" * 2_000),
    "nested groups": _regex("(" * 32_000 + "a" + ")" * 32_000),
    "repeats": _regex("a{100000000}"),
    "repeats of repeats": _regex("((((a{1000}){1000}){1000}){1000})"),
    "ranges of repeats": _regex("(a{0,1000}b{0,1000}){0,1000}c"),
    "catastrophic": _regex("(a+)+(a|aa)+(a|a?)+$" * 20),
    "far behind": _regex("(a|b)*a(a|b){300}"),
    "alternation": _regex("|".join(_WORDS)[:60_000].rpartition("|")[0]),
    "unicode classes": _regex(r"[\p{L}\p{N}&&[^\p{Lu}]]{400}\P{Cn}{400}" * 20),
    "look around": _regex(r"(?=a*b)(?!.*c)(a|b)\1*"),
    "conjunction of repeats": _lark("start: A\nA: " + " & ".join(f"/(.*{c}){{40}}.*/" for c in "abcdefgh")),
    "left recursion": _lark("start: a\na: a a a | b\nb: a b | " + '"x"'),
    "mutual recursion": _lark("start: r0\n" + "\n".join(f"r{n}: r{(n + 1) % 2000} | r0 r{n}" for n in range(2_000))),
    "nullable": _lark('start: (((("a"?)*)*)*)* (("b"?)*)* '),
    "unknown rule": _lark("start: nobody"),
    "deep schema": _schema(_DEEP_SCHEMA),
    "reference to itself": _schema({"$ref": "#"}),
    "references in a circle": _schema({"$defs": {"a": _to("b"), "b": _to("a")}, **_to("a")}),
    "branching references": _schema({"$defs": {**_CHOICES, "f40": {"type": "string"}}, "$ref": "#/$defs/f0"}),
    "all of": _schema({"allOf": [{"anyOf": [_pattern(c + d) for d in "abcdef"]} for c in "abcdefghij"]}),
    "long string": _schema({"type": "string", "minLength": 10**9, "maxLength": 10**9}),
    "many items": _schema({"type": "array", "minItems": 10**8, "items": {"type": "array", "minItems": 10**8}}),
    "many properties": _schema({"required": _WORDS[:2000], "properties": {word: {} for word in _WORDS[:2000]}}),
    "enum": _schema({"enum": _WORDS[:5_000]}),
    "pattern": _schema({"type": "string", "pattern": "^(a|b)*a(a|b){200}$"}),
    "numbers": _schema({"type": "number", "minimum": -1e308, "maximum": 1e308, "multipleOf": 1e-300}),
    "wrong kinds": _schema({"type": 5, "properties": [], "items": "x", "enum": {}}),
}  # fmt: skip
"""Each within the protocol's 64 KiB."""
TOO_DEEP = '{"items":' * 6_000 + "{}" + "}" * 6_000
"""JSON that no process of a service parses: refused when the request is read."""
