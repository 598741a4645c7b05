"""Functions that a model may call: what a request says of them, and what follows for prompt, grammar and reply.

| `tool_choice` | the prompt lists | the reply |
|---|---|---|
| none | no functions | is text, in the answer's format if there is one |
| auto | all | is free; a grammar holds it only where a promise was asked for (`strict`, one call at most, a format) |
| required | all | is calls by grammar, whatever the format |
| a function | all | is a call of that one by grammar, whatever the format |
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field, JsonValue, ValidationError

from paceline.protocol.errors import InvalidInput, require
from paceline.protocol.sampling import Grammar
from paceline_gateway.http.errors import field_path
from paceline_gateway.http.ignored_fields import Hint, hints_of
from paceline_gateway.http.shapes import BoundedList, RequestShape, require_shallow
from paceline_gateway.reply.call_grammar import CallRules, arguments_schema, call_grammar, grammar_after_reasoning
from paceline_gateway.reply.deltas import ReplyParser
from paceline_gateway.reply.format import ReplyFormat
from paceline_gateway.reply.parser import reply_parser

MAX_TOOLS = 128
"""OpenAI's limit."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class FunctionDefinition(RequestShape):
    """A function that may be called; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class ToolDefinition(RequestShape):
    """An item of `tools`."""

    type: Literal["function"]
    function: FunctionDefinition
    cache_control: Hint = None


class FunctionName(RequestShape):
    """A function by its name."""

    name: str


class NamedChoice(RequestShape):
    """A `tool_choice` that names a function."""

    type: Literal["function"]
    function: FunctionName


class ToolFields(RequestShape):
    """What a request says of functions."""

    tools: BoundedList[ToolDefinition] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None


@dataclass(frozen=True)
class ToolPlan:
    """What a request's functions mean.

    Attributes:
        rendered: what the prompt lists.
        callable: functions that the reply may call, with the schemas of their arguments; none: it is text.
        rules: what a grammar must hold the reply to; None: it is free.
        parallel: whether several calls may come.
        ignored: names of fields that change nothing.
    """

    rendered: tuple[Mapping[str, Any], ...] = ()
    callable: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    rules: CallRules | None = None
    parallel: bool = True
    ignored: frozenset[str] = frozenset()

    def grammar(self, form: ReplyFormat, answer: Grammar | None, *, in_reasoning: bool) -> Grammar | None:
        """The grammar that rules and answer need.

        Args:
            form: of the model's replies.
            answer: what the text of a reply must be; with it, calls must fit their schemas.
            in_reasoning: whether the template opened a span of reasoning.

        Raises:
            Unsupported: the model's format can't keep them.
        """
        if not self.callable:
            return grammar_after_reasoning(form, answer) if answer is not None and in_reasoning else answer
        rules = self.rules
        if rules is None and answer is not None:
            rules = CallRules(self.callable, required=False, parallel=self.parallel)
        return None if rules is None else call_grammar(form, rules, in_reasoning=in_reasoning, answer=answer)

    def parser(self, form: ReplyFormat, answer: Grammar | None, *, in_reasoning: bool) -> ReplyParser:
        """What takes one reply apart; one that has an answer calls at its beginning, or never."""
        must_call = self.rules is not None and self.rules.required
        return reply_parser(
            form, self.callable, in_reasoning=in_reasoning, must_call=must_call, calls_first=answer is not None
        )


def plan_tools(
    form: ReplyFormat, tools: object = None, tool_choice: object = None, parallel_tool_calls: object = None
) -> ToolPlan:
    """Read a request's three fields, as JSON.

    Raises:
        InvalidInput: a field is malformed.
        Unsupported: the model's template has no functions.
    """
    fields = _read(tools, tool_choice, parallel_tool_calls)
    listed = fields.tools or []
    choice = fields.tool_choice if fields.tool_choice is not None else "auto"
    if not listed:
        require(choice in ("none", "auto"), "tool_choice", choice, "none or auto without tools")
        return ToolPlan()
    definitions = _by_name(listed)
    if choice == "none":
        return ToolPlan()
    form.require_calls()
    names = _callable(choice, definitions)
    parallel = fields.parallel_tool_calls is not False
    schemas = {name: arguments_schema(definitions[name].parameters) for name in names}
    strict = any(definitions[name].strict for name in names)
    rules = _rules(choice, schemas, strict=strict, parallel=parallel)
    return ToolPlan(tuple(_listing(tool) for tool in listed), schemas, rules, parallel, frozenset(hints_of(fields)))


def _read(tools: object, tool_choice: object, parallel: object) -> ToolFields:
    given = {"tools": tools, "tool_choice": tool_choice, "parallel_tool_calls": parallel}
    try:
        return ToolFields.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = field_path(first["loc"], whole=first["type"] == "extra_forbidden")
        raise InvalidInput.of(place, first["input"], f"as OpenAI has it ({first['msg']})") from error


def _by_name(tools: Sequence[ToolDefinition]) -> dict[str, FunctionDefinition]:
    found: dict[str, FunctionDefinition] = {}
    for place, tool in enumerate(tools):
        function, field = tool.function, f"tools.{place}.function"
        named = _NAME.fullmatch(function.name) is not None and function.name not in found
        require(named, f"{field}.name", function.name, "1 to 64 letters, digits, _ or -, and no other's name")
        schema = function.parameters or {}
        is_object = schema.get("type", "object") == "object"
        require(is_object, f"{field}.parameters.type", schema.get("type"), "object")
        require_shallow(f"{field}.parameters", schema)
        found[function.name] = function
    return found


def _callable(choice: str | NamedChoice, definitions: Mapping[str, FunctionDefinition]) -> list[str]:
    if isinstance(choice, str):
        return list(definitions)
    name = choice.function.name
    require(name in definitions, "tool_choice.function.name", name, f"one of {', '.join(definitions)}")
    return [name]


def _rules(
    choice: str | NamedChoice, schemas: Mapping[str, Mapping[str, Any]], *, strict: bool, parallel: bool
) -> CallRules | None:
    """Free text alone can promise neither that arguments fit nor that one call is the last."""
    if choice == "auto" and not strict and parallel:
        return None
    return CallRules(schemas, required=choice != "auto", parallel=parallel and isinstance(choice, str))


def _listing(tool: ToolDefinition) -> Mapping[str, Any]:
    """As templates write it: what wasn't said isn't listed; `strict` is no matter of the model's."""
    return {"type": tool.type, "function": tool.function.model_dump(exclude_none=True, exclude={"strict"})}
