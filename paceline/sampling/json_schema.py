"""JSON schemas for the library: parts that it would not follow are refused, or rewritten so that it does.

The library refuses keywords that it does not know. The known ones that it does not always follow were found by texts
drawn at random (`tests/sampling/test_json_schema.py`), and are handled here:

| in a schema | what would happen | here |
|---|---|---|
| a part without a finite value | the text never ends | refused |
| `patternProperties` that name given properties alone | a comma behind which nothing may come | refused |
| `minProperties` of two more than `required` | names come twice | refused |
| bounds of numbers within one unit, one of them excluded | the excluded one comes | refused |
| bounds beyond 2^53 | they are rounded | refused |
| white space | may go on without end | a line break and some blanks |
| characters written as `\\u0061` | names pass for others | only as JSON demands |
| dates, times, host names | 29 February in every year, a second 60, any length | a pattern more |
| patterns | are read as Rust's | `paceline.sampling.json_patterns` |
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from paceline.sampling.json_nodes import Node, SchemaTree, as_list, as_mapping, types_of
from paceline.sampling.json_patterns import portable_pattern

GoesOn = Callable[[Node], bool]
"""Whether any text may follow the one that a schema forces."""
MAX_BOUND = 1 << 53
"""Integers up to here are exact in the library's floats."""
MAX_ALTERNATIVES = 10_000
MAX_DEPTH = 200
"""Most levels of a schema as text; the library's own descent is bounded elsewhere."""
_BLANKS = r"\n[ \t]{0,32}|[ \t]{1,32}"
_ESCAPES = 'nrbtf\\"'
_OPTIONS: Mapping[str, tuple[object, ...]] = {
    "whitespace_flexible": (True, False),
    "item_separator": (",", ", "),
    "key_separator": (":", ": "),
}
"""Options of `x-guidance`, with the values that leave JSON as it is."""
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_MAY_BE_CONTROL = re.compile(r"[\x00-\x1f\x7f]|\\(?:v|x(?:[01]|7f|\{)|u(?:00[01]|007f|\{))", re.IGNORECASE)
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    {"pattern": "^[0-9]{0,3}[1-9]"},
    {"pattern": f"^(?:.{{4}}-(?:0[13-9]|1[0-2])|.{{4}}-02-(?:[01]|2[0-8])|{_LEAP}-02-29)"},
)
_FORMATS: Mapping[str, tuple[Node, ...]] = {
    "date": _DATE,
    "date-time": (*_DATE, {"pattern": "^.{17}[0-5]"}),
    "time": ({"pattern": "^.{6}[0-5]"},),
    "hostname": ({"maxLength": 253},),
}
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_LARK_TEXT = re.compile(r'"(?:\\.|[^"\\])*"|(?:#|//)[^\n]*|/(?:\\.|[^/\\])+/|%json\s*(?=[{])')


def library_schema(text: str, goes_on: GoesOn) -> str:
    """A schema that the library follows.

    Raises:
        ValueError: the library can't follow a part of it; says which and why.
    """
    schema = json.loads(text)
    return json.dumps(_library_form(schema, goes_on))


def library_lark(text: str, goes_on: GoesOn) -> str:
    """A Lark grammar whose schemas (`%json`) the library follows. Raises as `library_schema`."""
    parts, start = [], 0
    while match := _LARK_TEXT.search(text, start):
        parts.append(text[start : match.end()])
        start = match.end()
        if match[0].startswith("%json"):
            rule = text[:start].rpartition("\n")[2].partition(":")[0]
            try:
                schema, start = json.JSONDecoder().raw_decode(text, start)
            except (ValueError, RecursionError):
                break  # the library says what is wrong with it
            try:
                parts.append(json.dumps(_library_form(schema, goes_on)))
            except ValueError as error:
                raise ValueError(f"{rule}: {error}") from error
    return "".join([*parts, text[start:]])


def _library_form(schema: Node, goes_on: GoesOn) -> Node:
    try:
        tree = SchemaTree(schema)
        parts = tree.all()
        for path, node in parts:
            _rewrite(path, node)
            _check_strings(path, node, goes_on)
        parts = tree.all()
        _check_ends(tree, parts)
        same = _SameValue(tree, goes_on)
        for path, node in [("#", schema), *(each for part in parts for each in tree.values(*part))]:
            same.check(path, node, ())
    except RecursionError:
        raise ValueError("nested too deeply") from None
    schema["x-guidance"] = _options(schema.get("x-guidance", {}))
    return schema


def _options(settings: object) -> Node:
    for name, value in as_mapping(settings).items():
        if name not in _OPTIONS:
            raise ValueError(f"x-guidance: must have {', '.join(_OPTIONS)} alone, not {name}")
        if value not in _OPTIONS[name]:
            raise ValueError(f"x-guidance.{name}: must be one of {', '.join(map(repr, _OPTIONS[name]))}")
    free = as_mapping(settings).get("whitespace_flexible", True)
    blanks = {"whitespace_pattern": _BLANKS} if free else {}
    return {**as_mapping(settings), **blanks, "json_allowed_escapes": _ESCAPES}


def _rewrite(path: str, node: Node) -> None:
    """Rewrite keywords that the library reads in another way."""
    for key in _BOUNDS:
        value = node.get(key)
        if isinstance(value, int | float) and not abs(value) <= MAX_BOUND:
            raise ValueError(f"{path}/{key}: must be in [-2^53, 2^53]")
    if node.get("uniqueItems") is False:
        del node["uniqueItems"]
    if isinstance(node.get("pattern"), str):
        node["pattern"] = portable_pattern(node["pattern"])
    if isinstance(node.get("patternProperties"), dict):
        node["patternProperties"] = {portable_pattern(key): each for key, each in node["patternProperties"].items()}
    if extras := _FORMATS.get(str(node.get("format"))):
        node["allOf"] = [*as_list(node.get("allOf")), *map(dict, extras)]


def _check_ends(tree: SchemaTree, parts: Sequence[tuple[str, Node]]) -> None:
    """Refuse parts that no finite value fits: a text that begins one would never end.

    Raises:
        ValueError: naming the part.
    """
    finite: set[int] = set()

    def ends(path: str, node: Any) -> bool:
        return not isinstance(node, dict) or id(node) in finite

    def all_end(children: Iterable[tuple[str, Any]]) -> bool:
        return all(ends(*child) for child in children)

    def whole(path: str, node: Node) -> bool:
        branches = list(tree.branches(path, node))
        one = not branches or any(ends(*each) for each in branches)
        inner = [(path, each) for each in _inevitable(node)]
        return one and all_end(tree.conjuncts(path, node)) and all_end(inner)

    waiting = list(reversed(parts))
    while finite_parts := [part for part in waiting if whole(*part)]:
        finite.update(id(node) for _, node in finite_parts)
        waiting = [part for part in waiting if id(part[1]) not in finite]
    if waiting:
        raise ValueError(f"{waiting[-1][0]}: no finite value fits this part")


def _inevitable(node: Node) -> Iterable[Any]:
    """Schemas of the parts that every object or list of this schema has."""
    if "const" in node or "enum" in node:
        return
    properties = as_mapping(node.get("properties"))
    if "object" in types_of(node):
        yield from (properties[name] for name in as_list(node.get("required")) if name in properties)
    least = node.get("minItems")
    if "array" in types_of(node) and isinstance(least, int) and least > 0:
        items = [*as_list(node.get("prefixItems")), *as_list(node.get("items"))]
        yield from items[:least]
        if len(items) < least:
            yield node.get("additionalItems") if isinstance(node.get("items"), list) else node.get("items")


class _SameValue:
    """Checks all schemas that one value must fit together, for every choice of branches."""

    def __init__(self, tree: SchemaTree, goes_on: GoesOn) -> None:
        self._tree = tree
        self._goes_on = goes_on
        self._visits: set[tuple[int, frozenset[int]]] = set()
        self._name_checks: set[tuple[tuple[str, ...], tuple[str, ...], bool]] = set()

    def check(self, path: str, node: Any, outer: tuple[Node, ...]) -> None:
        """Refuse what the library would not follow; `outer` are parts that the value must fit, too.

        Raises:
            ValueError: naming the part.
        """
        key = (id(node), frozenset(map(id, outer)))
        if not isinstance(node, dict) or key in self._visits:
            return
        self._visits.add(key)
        if len(self._visits) > MAX_ALTERNATIVES:
            raise ValueError(f"{path}: more than {MAX_ALTERNATIVES} alternatives")
        parts, branches = dict[int, Node](), list[tuple[str, Any]]()
        waiting: list[tuple[str, Any]] = [(path, node)]
        while waiting:
            where, part = waiting.pop()
            if isinstance(part, dict) and id(part) not in parts:
                parts[id(part)] = part
                waiting.extend(self._tree.conjuncts(where, part))
                branches.extend(self._tree.branches(where, part))
        all_parts = tuple({id(part): part for part in (*outer, *parts.values())}.values())
        types = frozenset.intersection(*map(types_of, all_parts))
        if "number" in types:
            _check_interval(path, all_parts)
        if "object" in types:
            self._check_names(path, all_parts)
        for branch in branches:
            self.check(*branch, all_parts)

    def _check_names(self, path: str, parts: Sequence[Node]) -> None:
        required_names = {name for part in parts for name in as_list(part.get("required")) if isinstance(name, str)}
        most = len(required_names) + 1
        if any(isinstance(least := part.get("minProperties"), int) and least > most for part in parts):
            raise ValueError(f"{path}/minProperties: must be at most {most}, one more than required names")
        patterns = {key: each for part in parts for key, each in as_mapping(part.get("patternProperties")).items()}
        names = required_names.union(*(as_mapping(part.get("properties")) for part in parts))
        closed = any(part.get("additionalProperties") is False for part in parts)
        check = (tuple(sorted(names)), tuple(key for key, each in patterns.items() if each is not False), closed)
        if not patterns or not names or check in self._name_checks:
            return
        self._name_checks.add(check)
        if not self._goes_on(_one_name_more(*check)):
            raise ValueError(f"{path}/patternProperties: name given properties alone; say there what they are")


def _one_name_more(names: Sequence[str], patterns: Sequence[str], closed: bool) -> Node:
    """The schema of an object of these names and another one."""
    nothing = {"const": None}
    return {
        "type": "object",
        "properties": dict.fromkeys(names, nothing),
        "required": list(names),
        "patternProperties": dict.fromkeys(patterns, nothing),
        "additionalProperties": False if closed else nothing,
        "minProperties": len(names) + 1,
        "x-guidance": {"whitespace_flexible": False},
    }


def _check_strings(path: str, node: Node, goes_on: GoesOn) -> None:
    """Refuse texts that need a character which can't be written without `\\u`.

    Raises:
        ValueError: naming the keyword.
    """
    values = [node["const"]] if "const" in node else as_list(node.get("enum"))
    if any(_CONTROL.search(text) for text in _strings(values)):
        raise ValueError(f"{path}: control characters in a value can't be written")
    pattern = node.get("pattern")
    if isinstance(pattern, str) and _MAY_BE_CONTROL.search(pattern):
        probe = {"type": "string", "pattern": pattern, "x-guidance": {"json_allowed_escapes": _ESCAPES}}
        if not goes_on(probe):
            raise ValueError(f"{path}/pattern: control characters can't be written")


def _strings(values: list[Any]) -> Iterator[str]:
    """Every text in some values, names of properties included."""
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            waiting.extend(value)
            waiting.extend(value.values() if isinstance(value, dict) else ())


def _check_interval(path: str, parts: Sequence[Node]) -> None:
    """A bound that is excluded and an integer comes nevertheless if the other one is less than 1 away."""
    lower, upper = list[tuple[float, bool]](), list[tuple[float, bool]]()
    for part in parts:
        for bounds, key, exclusive in (
            (lower, "minimum", "exclusiveMinimum"),
            (upper, "maximum", "exclusiveMaximum"),
        ):
            if _is_number(part.get(key)):
                bounds.append((part[key], part.get(exclusive) is True))
            if _is_number(part.get(exclusive)):
                bounds.append((part[exclusive], True))
    for low, low_excluded in lower:
        for high, high_excluded in upper:
            is_excluded = (low_excluded and low == int(low)) or (high_excluded and high == int(high))
            if is_excluded and 0 < high - low < 1:
                raise ValueError(f"{path}: bounds of a number, one of them excluded, must be at least 1 apart")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
