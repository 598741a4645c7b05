"""JSON schemas and texts drawn at random: what a grammar lets through, and whether it fits."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import jsonschema
import numpy as np

from paceline.models.tokenizer import TableTokenizer
from paceline.protocol.sampling import Grammar, GrammarKind
from paceline.sampling.grammar import GrammarMatcher, TokenTable, Vocabulary

END = 256
LONGEST = 3_000
BYTES = TableTokenizer(260, END)
TABLE = TokenTable(Vocabulary.of(BYTES))
_BLANKS = frozenset(b" \t\r\n")
_QUOTES = re.compile(rb'\\.|"')
MOST_BLANKS = 33
Schema = Any


def compiled(schema: Schema) -> GrammarMatcher:
    """At its start, as a worker would have it."""
    matcher = TABLE.compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    matcher.copy().next_token_mask()
    return matcher


def ids_of(mask: bytes) -> list[int]:
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()


def takes(start: GrammarMatcher, text: str) -> bool:
    """Whether a text is one of the language's."""
    at = start.copy()
    return all(at.push(byte) for byte in text.encode()) and END in ids_of(at.next_token_mask())


def drawn(start: GrammarMatcher, rng: random.Random) -> str | None:
    """A text drawn at random, in haste to end once it is long; None: it did not end.

    Raises:
        AssertionError: nothing may follow, or white space without end.
    """
    at, text, blanks = start.copy(), bytearray(), 0
    blank_share = rng.choice((0.1, 0.1, 0.9))
    while len(text) < LONGEST:
        ids = ids_of(at.next_token_mask())
        assert ids, f"nothing may follow {bytes(text[-60:])!r}"
        if END in ids and (len(ids) == 1 or rng.random() < 0.3):
            return text.decode()
        ids = [each for each in ids if each != END]
        groups = [[i for i in ids if i in _BLANKS], [i for i in ids if i not in _BLANKS]]
        chosen = groups[rng.random() >= blank_share] or groups[0] or groups[1]
        closing = [each for each in chosen if each in b'"}]']
        hurry = closing and rng.random() < 0.1 + len(text) / 1_000
        token = rng.choice(closing if hurry else chosen)
        assert at.push(token)
        text.append(token)
        blanks = blanks + 1 if token in _BLANKS and not _in_string(text) else 0
        assert blanks <= MOST_BLANKS, "white space is bounded"
    return None


def _in_string(text: bytearray) -> bool:
    return _QUOTES.findall(text).count(b'"') % 2 == 1


def _exact_multiple(_: object, divisor: float, value: Any, __: object) -> Iterator[jsonschema.ValidationError]:
    exact = type(value) in (int, float) and abs(value) < 1 << 53
    if exact and Fraction(repr(value)) % Fraction(repr(divisor)):
        yield jsonschema.ValidationError(f"{value} is no multiple of {divisor}")


_VALIDATOR = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"multipleOf": _exact_multiple})


def misfit(schema: Schema, text: str) -> str:
    """Why a text does not fit; empty: it does, or the validator follows a reference to itself without end."""
    try:
        _VALIDATOR(schema, format_checker=_VALIDATOR.FORMAT_CHECKER).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return str(getattr(error, "message", error))
    except RecursionError:
        return ""
    return ""


class SchemaDrawer:
    """Draws schemas of keywords that meet in every way."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def whole(self) -> Schema:
        """A schema with definitions that may refer to one another."""
        schema = self.part(3)
        names = ("p", "q")
        if isinstance(schema, dict) and "$ref" in json.dumps(schema):
            schema = {**schema, "$defs": {name: self.part(2) for name in names}}
        return schema if isinstance(schema, dict) else {"type": "integer"}

    def part(self, depth: int) -> Schema:
        rng = self._rng
        shapes: Sequence[Callable[[int], Schema]] = [self._number, self._text, self._listed]
        if depth > 0:
            shapes = [*shapes, self._object, self._object, self._array, self._union, self._all, self._reference]
        schema = rng.choice(shapes)(depth - 1)
        if rng.random() < 0.05:
            return rng.random() < 0.6
        return schema

    def _some(self, **keys: Callable[[], Any]) -> dict[str, Any]:
        return {name: make() for name, make in keys.items() if self._rng.random() < 0.35}

    def _number(self, _: int) -> Schema:
        rng = self._rng
        bounds = (-7, -1, -0.5, 0, 0.1, 0.25, 1, 2, 2.5, 9, 100, 1234.5)
        return {
            "type": rng.choice(("integer", "number", ["number", "null"])),
            **self._some(
                minimum=lambda: rng.choice(bounds),
                exclusiveMinimum=lambda: rng.choice(bounds),
                maximum=lambda: rng.choice(bounds),
                exclusiveMaximum=lambda: rng.choice(bounds),
                multipleOf=lambda: rng.choice((1, 2, 3, 0.5, 0.1, 1.5, 7)),
            ),
        }

    def _text(self, _: int) -> Schema:
        rng = self._rng
        patterns = ("^a", "b$", "^[a-c]{2,4}$", "^(a|bc)*$", r"^\w+\s?\W$", r"^.\d$", "^[[a]$", r"^[^\s\d]{2}$", "x?")
        formats = ("date", "date-time", "time", "email", "ipv4", "uuid", "hostname", "duration", "uri", "ipv6")
        return {
            "type": rng.choice(("string", "string", ["string", "boolean"])),
            **self._some(
                minLength=lambda: rng.randrange(5),
                maxLength=lambda: rng.randrange(6),
                pattern=lambda: rng.choice(patterns),
            ),
            **({"format": rng.choice(formats)} if rng.random() < 0.2 else {}),
        }

    def _listed(self, _: int) -> Schema:
        rng = self._rng
        values: Sequence[Any] = (1, 2.5, "a", "bc", None, True, [1, "a"], {"a": 1}, {"b": "bc", "a": None}, "é\n", "")
        extra = self._some(minimum=lambda: 2, minLength=lambda: 1, type=lambda: rng.choice(("string", "object")))
        if rng.random() < 0.5:
            return {"const": rng.choice(values), **extra}
        return {"enum": [rng.choice(values) for _ in range(rng.randrange(1, 5))], **extra}

    def _object(self, depth: int) -> Schema:
        rng = self._rng
        names = rng.sample(("a", "b", "ab", "é", 'q"', "a\t"), rng.randrange(4))
        patterns = ("^a$", "^[ab]$", "^a", "b", "^[^a]", "^é")
        return {
            "type": rng.choice(("object", "object", ["object", "null"])),
            "properties": {name: self.part(depth) for name in names},
            **self._some(
                required=lambda: rng.sample((*names, "z"), rng.randrange(len(names) + 2)),
                additionalProperties=lambda: rng.choice((False, False, True, self.part(depth))),
                patternProperties=lambda: {rng.choice(patterns): self.part(depth) for _ in range(2)},
                minProperties=lambda: rng.randrange(4),
                maxProperties=lambda: rng.randrange(4),
            ),
        }

    def _array(self, depth: int) -> Schema:
        rng = self._rng
        return {
            "type": "array",
            **self._some(
                items=lambda: self.part(depth),
                prefixItems=lambda: [self.part(depth) for _ in range(rng.randrange(1, 3))],
                minItems=lambda: rng.randrange(4),
                maxItems=lambda: rng.randrange(4),
            ),
        }

    def _union(self, depth: int) -> Schema:
        rng = self._rng
        base = self.part(depth) if rng.random() < 0.3 else {}
        parts = [self.part(depth) for _ in range(rng.randrange(1, 4))]
        return {**(base if isinstance(base, Mapping) else {}), rng.choice(("anyOf", "oneOf")): parts}

    def _all(self, depth: int) -> Schema:
        return {"allOf": [self.part(depth) for _ in range(2)], **self._some(minLength=lambda: 1, minItems=lambda: 1)}

    def _reference(self, _: int) -> Schema:
        return {"$ref": f"#/$defs/{self._rng.choice('pq')}"}
