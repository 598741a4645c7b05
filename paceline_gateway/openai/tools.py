"""Functions that a model may call: the fields of a request, and what follows for prompt, grammar and reply.

| `tool_choice` | the prompt lists | the reply |
|---|---|---|
| none | no functions | is text, in the answer's format if there is one |
| auto | all | is free; a grammar holds it only for a promise (`strict`, one call at most, a format) |
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
    """The fields of a request that are about functions."""

    tools: BoundedList[ToolDefinition] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None


@dataclass(frozen=True)
class ToolPlan:
    """The functions of one request.

    Attributes:
        listing: the functions that the prompt lists.
        functions: the functions that the reply may call, with the schemas of their arguments; none: it is text.
        rules: the rules that a grammar must enforce; None: the reply is free.
        parallel: whether several calls may come.
        ignored_fields: names of fields that change nothing.
    """

    listing: tuple[Mapping[str, Any], ...] = ()
    functions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    rules: CallRules | None = None
    parallel: bool = True
    ignored_fields: frozenset[str] = frozenset()

    def grammar(self, form: ReplyFormat, answer: Grammar | None, *, in_reasoning: bool) -> Grammar | None:
        """Return the grammar that rules and answer need.

        Args:
            form: the format of the model's replies.
            answer: the grammar of a reply's text; with it, calls must fit their schemas.
            in_reasoning: whether the template opened a span of reasoning.

        Raises:
            Unsupported: the model's format can't keep them.
        """
        if not self.functions:
            return grammar_after_reasoning(form, answer) if answer is not None and in_reasoning else answer
        rules = self.rules
        if rules is None and answer is not None:
            rules = CallRules(self.functions, required=False, parallel=self.parallel)
        return None if rules is None else call_grammar(form, rules, in_reasoning=in_reasoning, answer=answer)

    def parser(self, form: ReplyFormat, answer: Grammar | None, *, in_reasoning: bool) -> ReplyParser:
        """Build the parser of one reply; where the answer has a grammar, calls come first or not at all."""
        must_call = self.rules is not None and self.rules.required
        return reply_parser(
            form, self.functions, in_reasoning=in_reasoning, must_call=must_call, calls_first=answer is not None
        )


def plan_tools(
    form: ReplyFormat, tools: object = None, tool_choice: object = None, parallel_tool_calls: object = None
) -> ToolPlan:
    """Read the three fields of a request, as JSON.

    Raises:
        InvalidInput: a field is malformed.
        Unsupported: the model's template has no functions.
    """
    fields = _tool_fields(tools, tool_choice, parallel_tool_calls)
    definitions = fields.tools or []
    choice = fields.tool_choice if fields.tool_choice is not None else "auto"
    if not definitions:
        require(choice in ("none", "auto"), "tool_choice", choice, "none or auto without tools")
        return ToolPlan()
    functions = _by_name(definitions)
    if choice == "none":
        return ToolPlan()
    form.require_calls()
    names = _function_names(choice, functions)
    parallel = fields.parallel_tool_calls is not False
    schemas = {name: arguments_schema(functions[name].parameters) for name in names}
    strict = any(functions[name].strict for name in names)
    rules = _rules(choice, schemas, strict=strict, parallel=parallel)
    listing = tuple(_tool_listing(tool) for tool in definitions)
    return ToolPlan(listing, schemas, rules, parallel, frozenset(hints_of(fields)))


def _tool_fields(tools: object, tool_choice: object, parallel: object) -> ToolFields:
    raw_fields = {"tools": tools, "tool_choice": tool_choice, "parallel_tool_calls": parallel}
    try:
        return ToolFields.model_validate(raw_fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = field_path(first["loc"], keeps_last=first["type"] == "extra_forbidden")
        raise InvalidInput.of(path, first["input"], f"as OpenAI has it ({first['msg']})") from error


def _by_name(tools: Sequence[ToolDefinition]) -> dict[str, FunctionDefinition]:
    functions: dict[str, FunctionDefinition] = {}
    for place, tool in enumerate(tools):
        function, field = tool.function, f"tools.{place}.function"
        is_free_name = _NAME.fullmatch(function.name) is not None and function.name not in functions
        require(is_free_name, f"{field}.name", function.name, "1 to 64 letters, digits, _ or -, and no other's name")
        schema = function.parameters or {}
        is_object = schema.get("type", "object") == "object"
        require(is_object, f"{field}.parameters.type", schema.get("type"), "object")
        require_shallow(f"{field}.parameters", schema)
        functions[function.name] = function
    return functions


def _function_names(choice: str | NamedChoice, definitions: Mapping[str, FunctionDefinition]) -> list[str]:
    if isinstance(choice, str):
        return list(definitions)
    name = choice.function.name
    require(name in definitions, "tool_choice.function.name", name, f"one of {', '.join(definitions)}")
    return [name]


def _rules(
    choice: str | NamedChoice, schemas: Mapping[str, Mapping[str, Any]], *, strict: bool, parallel: bool
) -> CallRules | None:
    """Return a grammar's rules: free text can promise neither that arguments fit nor that one call is the last."""
    if choice == "auto" and not strict and parallel:
        return None
    return CallRules(schemas, required=choice != "auto", parallel=parallel and isinstance(choice, str))


def _tool_listing(tool: ToolDefinition) -> Mapping[str, Any]:
    """Return a tool as templates read it, without fields that are left out and without `strict`."""
    return {"type": tool.type, "function": tool.function.model_dump(exclude_none=True, exclude={"strict"})}
