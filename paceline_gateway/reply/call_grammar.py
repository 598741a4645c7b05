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
from paceline.sampling.json_nodes import SchemaTree, mapping, types_of
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
    """The language of replies that keep the rules, reasoning first where the model has it.

    Args:
        form: of the model's replies.
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
        opening, reply = writer.behind_text(calls)
    parallel = rules.parallel and calls.following is not None
    lines = [
        f"start: {reasoning} {reply}",
        f"calls: {opening} {writer.functions(calls, parallel=parallel)}",
        *writer.function_rules(calls, rules.functions),
    ]
    if answer is not None and not rules.required:
        lines.append(f"answer: {_told_apart(answer, calls)}")
    return Grammar(GrammarKind.LARK, "\n".join([*lines, *writer.terminals]))


def behind_reasoning(form: ReplyFormat, grammar: Grammar) -> Grammar:
    """A JSON schema's language behind the reasoning that a template opened.

    Raises:
        Unsupported: it isn't a schema's.
    """
    writer = _RuleWriter(form.tokens)
    reasoning = writer.reasoning(form.reasoning, in_reasoning=True)
    answer = _json_rule(grammar, "behind this model's reasoning")
    lines = [f"start: {reasoning} answer", *writer.terminals, f"answer: {answer}"]
    return Grammar(GrammarKind.LARK, "\n".join(lines))


class _RuleWriter:
    """Writes rules; `terminals` are those that they need."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = {text: token_id for text, token_id in tokens.items() if text.strip()}
        longest_first = sorted(self._tokens, key=len, reverse=True)
        self._any_token = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self.terminals: list[str] = []

    def literal(self, text: str) -> str:
        """A text as the format has it."""
        return " ".join(self._pieces(text)) or '""'

    def functions(self, form: CallFormat, *, parallel: bool) -> str:
        """From the first call's name to the end of the turn."""
        more = f" ({self.literal(form.following or '')} function)*" if parallel else ""
        return f"function{more} {self.literal(form.closing)}"

    def function_rules(self, form: CallFormat, functions: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """From a call's name to the end of its arguments."""
        names = [f"function_{place}" for place in range(len(functions))]
        lines = [f"function: {' | '.join(names)}"]
        for rule, (name, schema) in zip(names, functions.items(), strict=True):
            lines.append(f"{rule}: {self.literal(name)} {self.literal(form.between)} {rule}_arguments")
            if form.each is None:
                lines.append(f"{rule}_arguments: %json {_schema_text(schema)}")
            else:
                one_by_one = ParameterRules(form.each, self.literal, _schema_text, self.terminals)
                lines += one_by_one.of(f"{rule}_arguments", name, schema)
        return lines

    def reasoning(self, tags: ReasoningTags | None, *, in_reasoning: bool) -> str:
        """A span that the template opened must be closed; any other may be left out."""
        if tags is None:
            return ""
        self.terminals.append(r"SPACE: /\s+/")
        span = f"{self._up_to(tags.closing, 'reasoning')} SPACE?"
        return span if in_reasoning else f"({self.literal(tags.opening)} {span})?"

    def behind_text(self, form: CallFormat) -> tuple[str, str]:
        """What opens calls behind free text, and a reply: text in which no marker stands, and calls, if any."""
        if not form.marker:
            raise Unsupported.of("tools", "nothing marks a call in this model's free text; use tool_choice required")
        self.terminals.append(f"TEXT: /{_ANY}/ & ~/{_ANY}{_escaped(form.marker)}{_ANY}/")
        if self._starts_with_token(form.marker):
            return self.literal(form.opening), "(TEXT calls?)"
        rest = self.literal(form.opening.removeprefix(form.marker))
        return f"{self._up_to(form.marker, 'to_marker')} {rest}", "(TEXT | calls)"

    def _up_to(self, marker: str, rule: str) -> str:
        """Any text, the marker, and nothing behind it."""
        if self._starts_with_token(marker):
            self.terminals.append(f"ANY_{rule.upper()}: /{_ANY}/")
            return f"ANY_{rule.upper()} {self.literal(marker)}"
        self.terminals.append(f"{rule}[lazy]: /{_ANY}{_escaped(marker)}/")
        return rule

    def _starts_with_token(self, marker: str) -> bool:
        return self._any_token.match(marker) is not None

    def _pieces(self, text: str) -> Iterator[str]:
        at = 0
        for found in self._any_token.finditer(text):
            yield from _quoted(text[at : found.start()])
            yield f"<[{self._tokens[found[0]]}]>"
            at = found.end()
        yield from _quoted(text[at:])


def arguments_schema(parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The schema of a function's arguments; without one it has none."""
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return parameters if "type" in parameters else {"type": "object", **parameters}


def _told_apart(answer: Grammar, calls: CallFormat) -> str:
    """The rule of an answer that no reader takes for a call.

    Calls have a marker that begins no JSON; those that have none are objects of a name and arguments.
    """
    rule = _json_rule(answer, "where a reply may call tools")
    if not calls.marker.strip("[{") and (calls.is_list or _may_be_call(answer)):
        why = "can't be told from calls, which are JSON in this model's format: say additionalProperties false, and"
        raise Unsupported.of("response_format", f"{why} don't have name with arguments or parameters")
    return rule


def _json_rule(answer: Grammar, where: str) -> str:
    if answer.kind is not GrammarKind.JSON_SCHEMA:
        raise Unsupported.of("structured_outputs", f"only JSON schemas can be kept {where}, no {answer.kind.value}")
    return f"%json {json.dumps(json.loads(answer.text))}"


def _may_be_call(answer: Grammar) -> bool:
    """Whether an object that fits may have the keys of a call."""
    tree = SchemaTree(json.loads(answer.text))

    def may_be(node: object, within: tuple[int, ...] = ()) -> bool:
        if not isinstance(node, dict) or id(node) in within:
            return node is not False
        further = (*within, id(node))
        properties = mapping(node.get("properties"))
        is_closed = node.get("additionalProperties") is False and not node.get("patternProperties")
        has_keys = "name" in properties and any(key in properties for key in ARGUMENT_KEYS)
        if "object" not in types_of(node) or (is_closed and not has_keys):
            return False
        branches = [may_be(part, further) for _, part in tree.branches("#", node)]
        return all(may_be(part, further) for _, part in tree.conjuncts("#", node)) and any(branches or [True])

    try:
        return may_be(tree.root)
    except (ValueError, RecursionError):
        return True


def _schema_text(schema: Mapping[str, Any]) -> str:
    return json.dumps({"x-guidance": _SPACES, **schema})


def _quoted(text: str) -> Sequence[str]:
    return (json.dumps(text, ensure_ascii=False),) if text else ()


def _escaped(text: str) -> str:
    """For a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/")
