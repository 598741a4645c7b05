"""The parts of a JSON schema, and the references between them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

Node = dict[str, Any]
TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_LISTS = ("prefixItems", "items")
_SINGLE = ("items", "additionalItems", "additionalProperties")
_MAPPINGS = ("properties", "patternProperties")


class SchemaTree:
    """One schema's parts, by reference.

    Args:
        root: the whole.
    """

    def __init__(self, root: Node) -> None:
        self.root = root
        self._anchors: dict[str, Node] | None = None

    def values(self, path: str, node: Node) -> Iterator[tuple[str, Any]]:
        """Schemas of a value's parts: properties and items."""
        for key in _MAPPINGS:
            for name, child in as_mapping(node.get(key)).items():
                yield f"{path}/{key}/{name}", child
        for key in _LISTS:
            for place, child in enumerate(as_list(node.get(key))):
                yield f"{path}/{key}/{place}", child
        for key in _SINGLE:
            if key in node:
                yield f"{path}/{key}", node[key]

    def conjuncts(self, path: str, node: Node) -> Iterator[tuple[str, Any]]:
        """Further schemas that the same value must fit.

        Raises:
            ValueError: a reference leads out of the schema, or nowhere.
        """
        for place, child in enumerate(as_list(node.get("allOf"))):
            yield f"{path}/allOf/{place}", child
        if "$ref" in node:
            yield str(node["$ref"]), self.resolve(path, node["$ref"])

    def branches(self, path: str, node: Node) -> Iterator[tuple[str, Any]]:
        """Schemas one of which the same value must fit."""
        for key in ("anyOf", "oneOf"):
            for place, child in enumerate(as_list(node.get(key))):
                yield f"{path}/{key}/{place}", child

    def all(self) -> list[tuple[str, Node]]:
        """Every part that a value may have to fit, the whole first. Raises as `conjuncts`."""
        parts: dict[int, tuple[str, Node]] = {}
        waiting: list[tuple[str, Any]] = [("#", self.root)]
        while waiting:
            path, node = waiting.pop()
            if not isinstance(node, dict) or id(node) in parts:
                continue
            if "$id" in node and node is not self.root:
                raise ValueError(f"{path}/$id: a schema of its own within another is not supported")
            parts[id(node)] = (path, node)
            for children in (self.values, self.branches, self.conjuncts):
                waiting.extend(children(path, node))
        return list(parts.values())

    def resolve(self, path: str, ref: object) -> Any:
        """The schema that a reference leads to. Raises as `conjuncts`."""
        whole = self.root.get("$id")
        fragment = ref.removeprefix(whole) if isinstance(ref, str) and isinstance(whole, str) else ref
        if fragment == "":
            return self.root
        if not isinstance(fragment, str) or not fragment.startswith("#"):
            raise ValueError(f"{path}/$ref: {str(ref)[:60]!r} leads out of the schema")
        pointer = unquote(fragment[1:])
        if pointer and not pointer.startswith("/"):
            if pointer not in self._anchor_nodes():
                raise ValueError(f"{path}/$ref: {str(ref)[:60]!r} leads nowhere")
            return self._anchor_nodes()[pointer]
        node: Any = self.root
        for part in pointer.split("/")[1:]:
            node = _member(node, part.replace("~1", "/").replace("~0", "~"))
            if node is None:
                raise ValueError(f"{path}/$ref: {str(ref)[:60]!r} leads nowhere")
        return node

    def _anchor_nodes(self) -> dict[str, Node]:
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
    entry = node.get("type", list(TYPES))
    names = [entry] if isinstance(entry, str) else as_list(entry)
    types = frozenset(each for each in names if isinstance(each, str))
    return types | {"integer"} if "number" in types else types


def as_list(value: object) -> list[Any]:
    """A list as it is; an empty one for any other value, which the library refuses."""
    return value if isinstance(value, list) else []


def as_mapping(value: object) -> Mapping[str, Any]:
    """An object as it is; an empty one for any other value."""
    return value if isinstance(value, dict) else {}


def _member(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return value.get(name)
    at_place = isinstance(value, list) and name.isdecimal() and int(name) < len(value)
    return value[int(name)] if at_place else None
