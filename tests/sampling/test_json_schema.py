"""JSON schemas: what is drawn under them fits and ends, or they are refused by the part that can't be kept."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from paceline.protocol.errors import InvalidInput
from paceline.protocol.sampling import Grammar, GrammarKind
from paceline.sampling.json_patterns import portable_pattern
from paceline.sampling.json_schema import library_lark
from tests.sampling.random_schemas import TABLE, Schema, SchemaDrawer, compiled, drawn, misfit, takes
from tests.sampling.test_grammar import SCHEMA

pytestmark = pytest.mark.filterwarnings("ignore:Possible:FutureWarning")
"""Python's own, of sets within sets."""
INTEGER = {"type": "integer", "minimum": 0, "maximum": 99}


def closed(**more: Any) -> Schema:
    return {"type": "object", "additionalProperties": False, **more}


def with_defs(schema: Schema, **parts: Schema) -> Schema:
    return {**schema, "$defs": parts}


NEXT = {"$ref": "#/$defs/node"}
KEPT: dict[str, Schema] = {
    "names by pattern": closed(properties={"ab": INTEGER}, patternProperties={"^a": {"type": "integer"}}),
    "a name given and matched": closed(properties={"a": INTEGER}, patternProperties={"^a$|^b": {"multipleOf": 3}}),
    "a pattern alone": closed(patternProperties={"^[ab]$": INTEGER}, maxProperties=2),
    "one more name": {"properties": {"a": INTEGER}, "required": ["a"], "type": "object", "minProperties": 2},
    "a list that ends": with_defs(NEXT, node=closed(properties={"v": INTEGER, "next": NEXT}, required=["v"])),
    "a tree": with_defs(NEXT, node={"type": "array", "items": NEXT, "maxItems": 2}),
    "an anchor": {"$ref": "#n", "$defs": {"n": {"$anchor": "n", "type": "boolean"}}},
    "tuples": {"type": "array", "prefixItems": [INTEGER, {"type": "null"}], "items": False},
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}, {"multipleOf": 2}]},
    "one of": {"oneOf": [closed(properties={k: {"const": k}}, required=[k]) for k in ("a", "b")]},
    "exclusive bounds": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "multiples": {"type": "number", "multipleOf": 0.25, "minimum": -1, "maximum": 2},
    "dates": {"type": "string", "format": "date"},
    "classes of letters": {"type": "string", "pattern": r"^\w\W\d\D\s\S[^\s\w]$"},
    "odd classes": {"type": "string", "pattern": "^[[a&&b~][^[:]$"},
    "no control characters": {"type": "string", "pattern": r"^[^\x00-\x1f]{2}$"},
    "unique if nothing": {"type": "array", "items": INTEGER, "uniqueItems": False, "maxItems": 3},
    "any object": {"type": "object"},
    "an object": SCHEMA,
}


@pytest.mark.parametrize("name", KEPT)
def test_whatever_is_drawn_fits_and_ends(name: str) -> None:
    start = compiled(KEPT[name])
    whole = [text for seed in range(8) if (text := drawn(start, random.Random(seed))) is not None]
    assert whole
    assert not [(text, why) for text in whole if (why := misfit(KEPT[name], text))]
    assert all(takes(start, text) for text in whole)


NEVER_ENDS = closed(properties={"next": NEXT}, required=["next"])
REFUSED: dict[str, tuple[Schema, str]] = {
    "patternProperties": (
        closed(properties={"a": INTEGER}, patternProperties={"^a$": INTEGER}),
        "#/patternProperties: name given properties alone",
    ),
    "of every given name": (
        {"type": "array", "items": closed(properties={"a": {}, "b": {}}, patternProperties={"^[ab]$": {}})},
        "#/items/patternProperties",
    ),
    "in parts of one": (
        closed(allOf=[{"properties": {"a": {}}}, {"patternProperties": {"^a$": {}}}]),
        "#/patternProperties",
    ),
    "minProperties": ({"type": "object", "minProperties": 2}, "#/minProperties: must be at most 1"),
    "minProperties of patterns": (
        closed(patternProperties={"^a$": INTEGER}, minProperties=2),
        "#/minProperties: must be at most 1",
    ),
    "without end": (with_defs(NEXT, node=NEVER_ENDS), "no finite value"),
    "a branch without end": (with_defs({"anyOf": [INTEGER, NEXT]}, node=NEVER_ENDS), "no finite value"),
    "a list without end": (with_defs(NEXT, node={"type": "array", "items": NEXT, "minItems": 1}), "no finite value"),
    "itself": ({"$ref": "#"}, "no finite value"),
    "bounds": ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "must be at least 1 apart"),
    "bounds in parts": (
        {"allOf": [{"type": "number", "minimum": -0.5}, {"exclusiveMaximum": 0}]},
        "must be at least 1 apart",
    ),
    "large bounds": ({"type": "integer", "minimum": 1e20}, "#/minimum: must be in [-2^53, 2^53]"),
    "control characters": ({"const": "a\u0001"}, "control characters"),
    "in a pattern": (closed(properties={"a": {"type": "string", "pattern": r"^\x00$"}}), "/a/pattern: control"),
    "flags": ({"type": "string", "pattern": "(?m)^a$"}, "(?m) has another meaning"),
    "possessive": ({"type": "string", "pattern": "^a++$"}, "++ has another meaning"),
    "differences": ({"type": "string", "pattern": "^[a-z--b]$"}, "-- in a class"),
    "look around": ({"type": "string", "pattern": "^(?!a)b"}, "look-around"),
    "elsewhere": ({"$ref": "http://example.com/s"}, "leads out of the schema"),
    "nowhere": ({"$ref": "#/$defs/none"}, "leads nowhere"),
    "leniency": ({"type": "string", "x-guidance": {"lenient": True}}, "x-guidance"),
    "free white space": ({"x-guidance": {"whitespace_pattern": " +"}}, "x-guidance"),
    "separators": ({"x-guidance": {"item_separator": ";"}}, "x-guidance.item_separator"),
    "unsatisfiable": ({"type": "string", "const": 1}, "incompatible types"),
    "empty enum": ({"enum": []}, "is empty"),
    "least above most": ({"type": "array", "minItems": 3, "maxItems": 2}, "minItems"),
    "overlapping oneOf": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    **{
        key: ({key: value}, key)
        for key, value in {
            "not": {},
            "if": {},
            "uniqueItems": True,
            "contains": {},
            "propertyNames": {},
            "dependentRequired": {},
            "dependentSchemas": {},
            "unevaluatedProperties": False,
            "unevaluatedItems": False,
            "$dynamicRef": "#a",
        }.items()
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_t_be_kept_is_refused_before_a_text_begins(name: str) -> None:
    schema, names = REFUSED[name]
    with pytest.raises(InvalidInput) as caught:
        compiled(schema)
    assert caught.value.metadata["field"] == "json_schema"
    assert names in caught.value.metadata["limit"]


OPEN = {"type": "object", "properties": {"a": INTEGER, "é\n": False}, "patternProperties": {"^b": {"type": "null"}}}
LIST = {"type": "array", "items": INTEGER}
TAKEN: list[tuple[Schema, str, bool]] = [
    (OPEN, '{"a": 1, "c": "x"}', True),
    (OPEN, r'{"a": 1, "\u0061": "x"}', False),
    (OPEN, r'{"\u00e9\n": 1}', False),
    (OPEN, r'{"\u0062": 1}', False),
    (LIST, "[\n        1,\n        2\n]", True),
    (LIST, "[\n\n1]", False),
    (LIST, f"[{' ' * 33}1]", False),
    ({**LIST, "x-guidance": {"whitespace_flexible": False}}, "[ 1]", False),
    *(
        ({"type": "string", key: value}, json.dumps(text, ensure_ascii=False), taken)
        for key, value, text, taken in (
            ("format", "date", "2024-02-29", True),
            ("format", "date", "2023-02-29", False),
            ("format", "date", "1900-02-29", False),
            ("format", "date", "0000-01-01", False),
            ("format", "date-time", "2024-02-29T23:59:59Z", True),
            ("format", "date-time", "2024-02-29T12:00:60Z", False),
            ("format", "hostname", "a." * 120 + "b", True),
            ("format", "hostname", "a." * 130 + "b", False),
            ("pattern", r"^\s$", "\xa0", True),
            ("pattern", r"^\s$", "\x85", False),
            ("pattern", r"^\W$", "-", True),
            ("pattern", r"^\W$", "é", False),
            ("pattern", "^.$", "é", True),
            ("pattern", "^.$", "\u2028", False),
        )
    ),
]


@pytest.mark.parametrize(("schema", "text", "taken"), TAKEN)
def test_what_stands_in_a_text_is_as_every_reader_reads_it(schema: Schema, text: str, taken: bool) -> None:
    assert takes(compiled(schema), text) is taken


def test_schemas_within_lark_are_kept_and_its_own_texts_untouched() -> None:
    lark = 'start: "%json {}" /%json {}/ a // %json {}\na: %json {"type": "null"} | "b"\n'
    kept = library_lark(lark, lambda _: True)
    head, _, rest = kept.partition('a: %json {"type": "null", "x-guidance": ')
    assert head == 'start: "%json {}" /%json {}/ a // %json {}\n'
    assert rest.endswith('} | "b"\n')
    with pytest.raises(InvalidInput, match=r"lark = .*\(start: #/minProperties"):
        TABLE.compile(Grammar(GrammarKind.LARK, 'start: %json {"type": "object", "minProperties": 3}'))


@pytest.mark.parametrize("broken", ['start: %json {"type": ', "start: %json", "start: (", '{"a": '])
def test_a_broken_lark_is_the_library_s_to_refuse(broken: str) -> None:
    assert library_lark(broken, lambda _: True) == broken


def test_deep_and_branching_schemas_are_refused_in_time() -> None:
    deep = '{"items":' * 900 + "{}" + "}" * 900
    with pytest.raises(InvalidInput, match="json_schema"):
        TABLE.compile(Grammar(GrammarKind.JSON_SCHEMA, deep))


@pytest.mark.parametrize("pattern", ["[]a]", "[^]", r"\Aa", "(?x)a"])
def test_patterns_without_a_common_reading_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        portable_pattern(pattern)


def fits_always(seeds: range, texts: int) -> int:
    """How many schemas drawn at random are kept; each text under them fits."""
    kept = 0
    for seed in seeds:
        schema = SchemaDrawer(seed).whole()
        try:
            start = compiled(schema)
        except InvalidInput:
            continue
        kept += 1
        for draw in range(texts):
            text = drawn(start, random.Random(f"{seed} {draw}"))
            assert text is None or not (why := misfit(schema, text)), (seed, json.dumps(schema), text, why)
    return kept


def test_texts_under_schemas_drawn_at_random_fit() -> None:
    assert fits_always(range(40), 2) > 15


@pytest.mark.full
@pytest.mark.parametrize("part", range(8))
def test_many_texts_under_many_schemas_fit(part: int) -> None:
    assert fits_always(range(1_000 * part, 1_000 * (part + 1)), 8) > 400
