"""Grammar rules for arguments that are written one by one: as much of a JSON schema as can be kept so.

Parameters come in the schema's order, and only those that it lists. A string is any text without the end of a value,
or one of the schema's choices. Every other value is JSON by its schema. What can't be kept is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from paceline.protocol.errors import Unsupported, require
from paceline_gateway.reply.format import ParameterFormat
from paceline_gateway.reply.parameter_values import STRING, parameters_of, types_of

_ANNOTATIONS = frozenset(("title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id"))
_OBJECT_KEYS = _ANNOTATIONS | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_STRING_KEYS = _ANNOTATIONS | {"type", "enum", "const", "anyOf"}
_EXCLUSIVE_KEYS = ({"anyOf", "type"}, {"anyOf", "enum"}, {"anyOf", "const"}, {"enum", "const"})
"""Keys of a parameter that together say more than either."""
_NAME = re.compile(r"[^<>\[\]\s]+")


class ParameterRules:
    """Writes the rules of one function's arguments.

    Args:
        form: the text around one argument.
        literal: writes a text of the format as a rule.
        json_text: writes a schema as `%json` takes it.
        terminals: rules of whole values are added to it.
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

    def rules(self, rule: str, name: str, schema: Mapping[str, Any]) -> list[str]:
        """Return the rule and those that it needs.

        Raises:
            Unsupported: naming the function and what of its schema can't be kept.
        """
        field = f"tools: {name}.parameters"
        _check_keys(field, schema, _OBJECT_KEYS)
        parameters, required = parameters_of(schema), schema.get("required") or []
        require(isinstance(required, list), f"{field}.required", required, "a list of names")
        if any(name not in parameters for name in required):
            reason = "names a property that isn't listed, as this model's format needs"
            raise Unsupported.of(f"{field}.required", reason)
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        rule_names, lines = [], []
        for place, (parameter, parameter_schema) in enumerate(parameters.items()):
            path = f"{field}.properties"
            if not _NAME.fullmatch(parameter):
                raise Unsupported.of(path, f"{parameter!r} can't be written in this model's format")
            rule_name = f"{rule}_{place}"
            rule_names.append(rule_name if parameter in required else f"{rule_name}?")
            lines += self._parameter(rule_name, f"{path}.{parameter}", parameter, parameter_schema, definitions)
        return [f"{rule}: {' '.join(rule_names) or self._literal('')}", *lines]

    def _parameter(self, rule: str, field: str, name: str, schema: Any, definitions: Mapping[str, Any]) -> list[str]:
        prefix = f"{self._literal(self._form.name_prefix + name + self._form.value_prefix)}"
        types = types_of(schema)
        if "string" not in types:
            schema = schema if isinstance(schema, Mapping) else {}
            lines = [f"{rule}_value: %json {self._json_text({**definitions, **schema})}"]
            return [f"{rule}: {prefix} {rule}_value {self._literal(self._form.value_suffix)}", *lines]
        _check_keys(field, schema, _STRING_KEYS)
        choices = _choices_of(schema)
        if choices is None:
            return [f"{rule}: {prefix} {self._any_text()}"]
        is_distinct = types == STRING and all(isinstance(text, str) and self._end not in text for text in choices)
        if not is_distinct:
            raise Unsupported.of(field, "these values can't be told apart in this model's format")
        texts = " | ".join(map(self._literal, choices))
        return [f"{rule}: {prefix} ({texts}) {self._literal(self._form.value_suffix)}"]

    @property
    def _end(self) -> str:
        return self._form.value_suffix.strip()

    def _any_text(self) -> str:
        """Write a value up to its end, with any white space in front of the end."""
        end = re.escape(self._end).replace("/", r"\/")
        rule = rf"argument_text[lazy]: /(.|\n)*{end}/"
        if rule not in self._terminals:
            self._terminals.append(rule)
        space = self._form.value_suffix.rpartition(self._end)[2]
        return f"argument_text {self._literal(space)}" if space else "argument_text"


def _choices_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that a schema lists; None: it lists none."""
    if "const" in schema:
        return [schema["const"]]
    if "enum" in schema:
        return list(schema["enum"])
    return None


def _check_keys(field: str, schema: Mapping[str, Any], allowed_keys: frozenset[str]) -> None:
    for key, value in schema.items():
        if key not in allowed_keys and not key.startswith("x-"):
            raise Unsupported.of(f"{field}.{key}", "can't be kept in this model's format")
        if key == "anyOf":
            for part in value:  # of known types each: they were read
                _check_keys(field, part, _ANNOTATIONS | {"type"})
    conflict = next((keys for keys in _EXCLUSIVE_KEYS if keys <= schema.keys()), None)
    if conflict is not None:
        both_keys = " and ".join(sorted(conflict))
        raise Unsupported.of(f"{field}: {both_keys}", "can't both be kept in this model's format")
