"""Rules of arguments that are written one by one: what of a JSON schema can be kept so.

Parameters come in the schema's order, none but those that it lists. A string is any text without the end of a value,
or one of the listed ones; everything else is JSON by its schema. What can't be kept is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from paceline.protocol.errors import Unsupported, require
from paceline_gateway.reply.format import ParameterFormat
from paceline_gateway.reply.parameter_values import STRING, parameters_of, types_of

_SAYS_NOTHING = frozenset(("title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id"))
_OF_OBJECTS = _SAYS_NOTHING | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_OF_TEXTS = _SAYS_NOTHING | {"type", "enum", "const", "anyOf"}
_ALONE = ({"anyOf", "type"}, {"anyOf", "enum"}, {"anyOf", "const"}, {"enum", "const"})
"""Keys of a parameter that together say more than either."""
_NAME = re.compile(r"[^<>\[\]\s]+")


class ParameterRules:
    """Writes the rules of one function's arguments.

    Args:
        form: of an argument.
        literal: writes a text of the format.
        json_text: writes a schema as `%json` has it.
        terminals: where rules of whole values are added.
    """

    def __init__(
        self,
        form: ParameterFormat,
        literal: Callable[[str], str],
        json_text: Callable[[Mapping[str, Any]], str],
        terminals: list[str],
    ) -> None:
        self._form = form
        self._literal = literal
        self._json_text = json_text
        self._terminals = terminals

    def of(self, rule: str, name: str, schema: Mapping[str, Any]) -> list[str]:
        """The rule and those that it needs.

        Raises:
            Unsupported: naming the function and what of its schema can't be kept.
        """
        field = f"tools: {name}.parameters"
        _check_keys(field, schema, _OF_OBJECTS)
        parameters, required = parameters_of(schema), schema.get("required") or []
        require(isinstance(required, list), f"{field}.required", required, "a list of names")
        if any(each not in parameters for each in required):
            raise Unsupported.of(
                f"{field}.required", "names a property that isn't listed, as this model's format needs"
            )
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        items, lines = [], []
        for place, (parameter, given) in enumerate(parameters.items()):
            if not _NAME.fullmatch(parameter):
                raise Unsupported.of(f"{field}.properties", f"{parameter!r} can't be written in this model's format")
            item = f"{rule}_{place}"
            items.append(item if parameter in required else f"{item}?")
            lines += self._parameter(item, f"{field}.properties.{parameter}", parameter, given, shared)
        return [f"{rule}: {' '.join(items) or self._literal('')}", *lines]

    def _parameter(self, item: str, field: str, name: str, given: Any, shared: Mapping[str, Any]) -> list[str]:
        front = f"{self._literal(self._form.before_name + name + self._form.before_value)}"
        types = types_of(given)
        if "string" not in types:
            schema = given if isinstance(given, Mapping) else {}
            lines = [f"{item}_value: %json {self._json_text({**shared, **schema})}"]
            return [f"{item}: {front} {item}_value {self._literal(self._form.behind_value)}", *lines]
        _check_keys(field, given, _OF_TEXTS)
        listed = _listed(given)
        if listed is None:
            return [f"{item}: {front} {self._any_text()}"]
        told_apart = types == STRING and all(isinstance(text, str) and self._end not in text for text in listed)
        if not told_apart:
            raise Unsupported.of(field, "these values can't be told apart in this model's format")
        texts = " | ".join(map(self._literal, listed))
        return [f"{item}: {front} ({texts}) {self._literal(self._form.behind_value)}"]

    @property
    def _end(self) -> str:
        return self._form.behind_value.strip()

    def _any_text(self) -> str:
        """A value up to its end, whatever white space stands in front of that."""
        end = re.escape(self._end).replace("/", r"\/")
        rule = rf"argument_text[lazy]: /(.|\n)*{end}/"
        if rule not in self._terminals:
            self._terminals.append(rule)
        rest = self._form.behind_value.rpartition(self._end)[2]
        return f"argument_text {self._literal(rest)}" if rest else "argument_text"


def _listed(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that a schema lists; None: it lists none."""
    if "const" in schema:
        return [schema["const"]]
    if "enum" in schema:
        return list(schema["enum"])
    return None


def _check_keys(field: str, schema: Mapping[str, Any], known: frozenset[str]) -> None:
    for key, value in schema.items():
        if key not in known and not key.startswith("x-"):
            raise Unsupported.of(f"{field}.{key}", "can't be kept in this model's format")
        if key == "anyOf":
            for part in value:  # of known types each: they were read
                _check_keys(field, part, _SAYS_NOTHING | {"type"})
    both = next((keys for keys in _ALONE if keys <= schema.keys()), None)
    if both is not None:
        raise Unsupported.of(f"{field}: {' and '.join(sorted(both))}", "can't both be kept in this model's format")
