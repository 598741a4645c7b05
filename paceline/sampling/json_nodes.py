"""The parts of a JSON schema, and what refers to what. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

Node = dict[str, Any]
TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_LISTS = ("prefixItems", "items")
_SINGLE = ("items", "additionalItems", "additionalProperties")
_NAMED = ("properties", "patternProperties")


class SchemaTree:
    """One schema's parts, by reference.

    Args:
        root: the whole.
    """

    def __init__(self, root: Node) -> None:
        self.root = root
        self._anchors: dict[str, Node] | None = None

    def values(self, path: str, node: Node) -> Iterator[tuple[str, Any]]:
        """Schemas of what stands in a value: properties and items."""
        for key in _NAMED:
            for name, child in mapping(node.get(key)).items():
                yield f"{path}/{key}/{name}", child
        for key in _LISTS:
            for place, child in enumerate(listed(node.get(key))):
                yield f"{path}/{key}/{place}", child
        for key in _SINGLE:
            if key in node:
                yield f"{path}/{key}", node[key]

    def conjuncts(self, path: str, node: Node) -> Iterator[tuple[str, Any]]:
        """Schemas that the same value must fit, too.

        Raises:
            ValueError: a reference leads out of the schema, or nowhere.
        """
        for place, child in enumerate(listed(node.get("allOf"))):
            yield f"{path}/allOf/{place}", child
        if "$ref" in node:
            yield str(node["$ref"]), self.referred(path, node["$ref"])

    def branches(self, path: str, node: Node) -> Iterator[tuple[str, Any]]:
        """Schemas of which the same value must fit one."""
        for key in ("anyOf", "oneOf"):
            for place, child in enumerate(listed(node.get(key))):
                yield f"{path}/{key}/{place}", child

    def all(self) -> list[tuple[str, Node]]:
        """Every part that a value may have to fit, the whole first. Raises as `conjuncts`."""
        seen: dict[int, tuple[str, Node]] = {}
        waiting: list[tuple[str, Any]] = [("#", self.root)]
        while waiting:
            path, node = waiting.pop()
            if not isinstance(node, dict) or id(node) in seen:
                continue
            if "$id" in node and node is not self.root:
                raise ValueError(f"{path}/$id: a schema of its own within another is not supported")
            seen[id(node)] = (path, node)
            for children in (self.values, self.branches, self.conjuncts):
                waiting.extend(children(path, node))
        return list(seen.values())

    def referred(self, path: str, ref: object) -> Any:
        """What a reference means. Raises as `conjuncts`."""
        whole = self.root.get("$id")
        fragment = ref.removeprefix(whole) if isinstance(ref, str) and isinstance(whole, str) else ref
        if fragment == "":
            return self.root
        if not isinstance(fragment, str) or not fragment.startswith("#"):
            raise ValueError(f"{path}/$ref: {str(ref)[:60]!r} leads out of the schema")
        pointer = unquote(fragment[1:])
        if pointer and not pointer.startswith("/"):
            if pointer not in self._anchored():
                raise ValueError(f"{path}/$ref: {str(ref)[:60]!r} leads nowhere")
            return self._anchored()[pointer]
        found: Any = self.root
        for part in pointer.split("/")[1:]:
            found = _member(found, part.replace("~1", "/").replace("~0", "~"))
            if found is None:
                raise ValueError(f"{path}/$ref: {str(ref)[:60]!r} leads nowhere")
        return found

    def _anchored(self) -> dict[str, Node]:
        if self._anchors is None:
            self._anchors, waiting = {}, [self.root]
            while waiting:
                part: Any = waiting.pop()
                if isinstance(part, dict) and isinstance(part.get("$anchor"), str):
                    self._anchors[part["$anchor"]] = part
                waiting.extend(part.values() if isinstance(part, dict) else part if isinstance(part, list) else ())
        return self._anchors


def types_of(node: Node) -> frozenset[str]:
    """JSON types that a part allows; a number may be an integer."""
    named = node.get("type", list(TYPES))
    names = [named] if isinstance(named, str) else listed(named)
    types = frozenset(each for each in names if isinstance(each, str))
    return types | {"integer"} if "number" in types else types


def listed(value: object) -> list[Any]:
    """A list as it is; nothing, where something else stands, which the library refuses."""
    return value if isinstance(value, list) else []


def mapping(value: object) -> Mapping[str, Any]:
    """An object as it is; an empty one, where something else stands."""
    return value if isinstance(value, dict) else {}


def _member(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return value.get(name)
    at_place = isinstance(value, list) and name.isdecimal() and int(name) < len(value)
    return value[int(name)] if at_place else None
