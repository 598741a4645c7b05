"""A grammar of calls in a template's own words: Lark as llguidance reads it, arguments by their JSON schemas.

Markers that are one token are written as that token (`<[id]>`): spelled letter by letter they would be other ids
than those that the model was trained on. JSON has the spaces that templates write (`tojson`), and no others: a
small model may fill a reply with white space.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.protocol.errors import Unsupported
from paceline.protocol.sampling import Grammar, GrammarKind
from paceline.sampling.json_nodes import SchemaTree, as_mapping, types_of
from paceline_gateway.reply.format import ARGUMENT_KEYS, CallFormat, ReasoningTags, ReplyFormat
from paceline_gateway.reply.parameter_grammar import ParameterRules

_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY = r"(.|\n)*"


@dataclass(frozen=True)
class CallRules:
    """What calls of a reply must be.

    Attributes:
        functions: name and JSON schema of the arguments of each that may be called.
        required: whether there must be a call, and nothing else; otherwise there may be one behind free text.
        parallel: whether several may come.
    """

    functions: Mapping[str, Mapping[str, Any]]
    required: bool
    parallel: bool


def call_grammar(
    form: ReplyFormat, rules: CallRules, *, in_reasoning: bool, answer: Grammar | None = None
) -> Grammar:
    """Write the language of replies that keep the rules, reasoning first where the model has it.

    Args:
        form: the format of the model's replies.
        rules: what calls must be.
        in_reasoning: whether the template opened a span of reasoning.
        answer: what a reply without calls must be, where calls are not required; None: free text.

    Raises:
        Unsupported: the format has no calls; or a call can't be told from free text, or from an answer.
    """
    calls = form.require_calls()
    writer = _RuleWriter(form.tokens)
    reasoning = writer.reasoning(form.reasoning, in_reasoning=in_reasoning)
    if rules.required or answer is not None:
        opening, reply = writer.literal(calls.opening), "calls" if rules.required else "(answer | calls)"
    else:
        opening, reply = writer.calls_after_text(calls)
    parallel = rules.parallel and calls.separator is not None
    lines = [
        f"start: {reasoning} {reply}",
        f"calls: {opening} {writer.functions(calls, parallel=parallel)}",
        *writer.function_rules(calls, rules.functions),
    ]
    if answer is not None and not rules.required:
        lines.append(f"answer: {_answer_rule(answer, calls)}")
    return Grammar(GrammarKind.LARK, "\n".join([*lines, *writer.terminals]))


def grammar_after_reasoning(form: ReplyFormat, grammar: Grammar) -> Grammar:
    """Write a JSON schema's language behind the reasoning that a template opened.

    Raises:
        Unsupported: the grammar is no JSON schema.
    """
    writer = _RuleWriter(form.tokens)
    reasoning = writer.reasoning(form.reasoning, in_reasoning=True)
    answer = _json_rule(grammar, "behind this model's reasoning")
    lines = [f"start: {reasoning} answer", *writer.terminals, f"answer: {answer}"]
    return Grammar(GrammarKind.LARK, "\n".join(lines))


class _RuleWriter:
    """Writes rules of Lark; `terminals` collects those that other rules need."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = {text: token_id for text, token_id in tokens.items() if text.strip()}
        longest_first = sorted(self._tokens, key=len, reverse=True)
        self._any_token = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self.terminals: list[str] = []

    def literal(self, text: str) -> str:
        """Write a text of the format."""
        return " ".join(self._pieces(text)) or '""'

    def functions(self, form: CallFormat, *, parallel: bool) -> str:
        """Write the rule from the first call's name to the end of the turn."""
        further_calls = f" ({self.literal(form.separator or '')} function)*" if parallel else ""
        return f"function{further_calls} {self.literal(form.closing)}"

    def function_rules(self, form: CallFormat, functions: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Write the rules from a call's name to the end of its arguments."""
        names = [f"function_{place}" for place in range(len(functions))]
        lines = [f"function: {' | '.join(names)}"]
        for rule, (name, schema) in zip(names, functions.items(), strict=True):
            lines.append(f"{rule}: {self.literal(name)} {self.literal(form.name_suffix)} {rule}_arguments")
            if form.parameter is None:
                lines.append(f"{rule}_arguments: %json {_schema_text(schema)}")
            else:
                parameters = ParameterRules(form.parameter, self.literal, _schema_text, self.terminals)
                lines += parameters.rules(f"{rule}_arguments", name, schema)
        return lines

    def reasoning(self, tags: ReasoningTags | None, *, in_reasoning: bool) -> str:
        """Write a span of reasoning: one that the template opened must be closed, any other may be left out."""
        if tags is None:
            return ""
        self.terminals.append(r"SPACE: /\s+/")
        span = f"{self._text_until(tags.closing, 'reasoning')} SPACE?"
        return span if in_reasoning else f"({self.literal(tags.opening)} {span})?"

    def calls_after_text(self, form: CallFormat) -> tuple[str, str]:
        """Write what opens calls behind free text, and the reply: text without a marker, then calls, if any."""
        if not form.marker:
            raise Unsupported.of("tools", "nothing marks a call in this model's free text; use tool_choice required")
        self.terminals.append(f"TEXT: /{_ANY}/ & ~/{_ANY}{_regex_literal(form.marker)}{_ANY}/")
        if self._starts_with_token(form.marker):
            return self.literal(form.opening), "(TEXT calls?)"
        opening = self.literal(form.opening.removeprefix(form.marker))
        return f"{self._text_until(form.marker, 'to_marker')} {opening}", "(TEXT | calls)"

    def _text_until(self, marker: str, rule: str) -> str:
        """Write any text up to a marker, with the marker."""
        if self._starts_with_token(marker):
            self.terminals.append(f"ANY_{rule.upper()}: /{_ANY}/")
            return f"ANY_{rule.upper()} {self.literal(marker)}"
        self.terminals.append(f"{rule}[lazy]: /{_ANY}{_regex_literal(marker)}/")
        return rule

    def _starts_with_token(self, marker: str) -> bool:
        return self._any_token.match(marker) is not None

    def _pieces(self, text: str) -> Iterator[str]:
        position = 0
        for match in self._any_token.finditer(text):
            yield from _string_literal(text[position : match.start()])
            yield f"<[{self._tokens[match[0]]}]>"
            position = match.end()
        yield from _string_literal(text[position:])


def arguments_schema(parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the schema of a function's arguments; a function without `parameters` takes none."""
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return parameters if "type" in parameters else {"type": "object", **parameters}


def _answer_rule(answer: Grammar, calls: CallFormat) -> str:
    """Write the rule of an answer that no reader takes for a call.

    Most calls have a marker that begins no JSON. Those without one are objects of a name and arguments.
    """
    rule = _json_rule(answer, "where a reply may call tools")
    if not calls.marker.strip("[{") and (calls.is_list or _may_be_call(answer)):
        reason = "can't be told from calls, which are JSON in this model's format: say additionalProperties false,"
        raise Unsupported.of("response_format", f"{reason} and don't have name with arguments or parameters")
    return rule


def _json_rule(answer: Grammar, place: str) -> str:
    if answer.kind is not GrammarKind.JSON_SCHEMA:
        reason = f"only JSON schemas can be kept {place}, no {answer.kind.value}"
        raise Unsupported.of("structured_outputs", reason)
    return f"%json {json.dumps(json.loads(answer.text))}"


def _may_be_call(answer: Grammar) -> bool:
    """Whether an object that fits may have the keys of a call."""
    tree = SchemaTree(json.loads(answer.text))

    def may_be(node: object, ancestors: tuple[int, ...] = ()) -> bool:
        if not isinstance(node, dict) or id(node) in ancestors:
            return node is not False
        path = (*ancestors, id(node))
        properties = as_mapping(node.get("properties"))
        is_closed = node.get("additionalProperties") is False and not node.get("patternProperties")
        has_keys = "name" in properties and any(key in properties for key in ARGUMENT_KEYS)
        if "object" not in types_of(node) or (is_closed and not has_keys):
            return False
        branches = [may_be(part, path) for _, part in tree.branches("#", node)]
        return all(may_be(part, path) for _, part in tree.conjuncts("#", node)) and any(branches or [True])

    try:
        return may_be(tree.root)
    except (ValueError, RecursionError):
        return True


def _schema_text(schema: Mapping[str, Any]) -> str:
    return json.dumps({"x-guidance": _SPACES, **schema})


def _string_literal(text: str) -> Sequence[str]:
    return (json.dumps(text, ensure_ascii=False),) if text else ()


def _regex_literal(text: str) -> str:
    """Escape a text for a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/")
