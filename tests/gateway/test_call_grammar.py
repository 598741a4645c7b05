"""Grammars of calls, followed by the target's own library: what they allow, in each template's format."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from paceline.protocol.errors import Unsupported
from paceline.protocol.sampling import Grammar, GrammarKind
from paceline.sampling.grammar import GrammarMatcher
from paceline_gateway.reply.call_grammar import CallRules, arguments_schema, call_grammar, grammar_after_reasoning
from paceline_gateway.reply.deltas import ReplyDelta
from tests.gateway.replies import allowed, compiled, form_of, ids_of, parsed, table_of, takes, tokenizer_of

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Bonn", "Kiel"]}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
FUNCTIONS = {"get_weather": WEATHER, "now": arguments_schema(None)}
NAMES = ("HERMES", "THINKING", "LLAMA", "MISTRAL", "NAMED", "DEEPSEEK", "QWEN", "GLM", "TABLE")
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>'


def in_full(*names: str) -> list[Any]:
    """Formats whose calls alone are drawn in `make test`."""
    return [pytest.param(name, marks=pytest.mark.full) for name in names]


def matcher(name: str, *, required: bool, parallel: bool = True, in_reasoning: bool = False) -> GrammarMatcher:
    return compiled(name, CallRules(FUNCTIONS, required=required, parallel=parallel), in_reasoning=in_reasoning)


def fits(name: str, text: str, *, required: bool, parallel: bool = True, in_reasoning: bool = False) -> bool:
    return takes(matcher(name, required=required, parallel=parallel, in_reasoning=in_reasoning), name, text)


def text_of(name: str, ids: list[int]) -> str:
    """As a gateway sees it: special tokens that the format is made of are written."""
    tokenizer, hidden = tokenizer_of(name), form_of(name).marker_tokens
    return "".join(hidden.get(i) or tokenizer.decode((i,)) for i in ids)


def walk(at: GrammarMatcher, name: str, rng: random.Random) -> list[int]:
    ends, output = tokenizer_of(name).eos_token_ids, list[int]()
    while True:
        ids = set(allowed(at))
        if ids <= ends or (ids & ends and rng.random() < 0.5):
            return output
        token = rng.choice(sorted(ids - ends))
        assert at.push(token)
        output.append(token)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "THINKING"])
def test_whatever_is_drawn_is_calls_that_fit(name: str) -> None:
    rng, several = random.Random(7), 0
    for _ in range(8):
        text = text_of(name, walk(matcher(name, required=True), name, rng))
        deltas = parsed(name, [text], FUNCTIONS)
        calls = [delta.tool_call for delta in deltas if delta.tool_call]
        assert len(calls) == len(deltas) >= 1, text
        several += len(calls) > 1
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), FUNCTIONS[call.name])
    assert bool(several) is (form_of(name).require_calls().separator is not None)


@pytest.mark.parametrize("name", ["HERMES", "TABLE"])
def test_required_is_a_call_and_nothing_else(name: str) -> None:
    assert fits(name, CALL, required=True)
    assert fits(name, f"{CALL}\n{CALL}", required=True)
    assert not fits(name, f"{CALL}\n{CALL}", required=True, parallel=False)
    for text in (f"Well. {CALL}", CALL.replace("Bonn", "Rome"), CALL.replace("get_weather", "sell")):
        assert not fits(name, text, required=True), text


@pytest.mark.parametrize("name", ["HERMES", "TABLE", "MISTRAL"])
def test_free_text_may_have_calls_that_fit_and_no_others(name: str) -> None:
    call = CALL if name != "MISTRAL" else '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Bonn"}}]'
    for text in ("", "Hello < you", call, f"Let me see.\n{call}"):
        assert fits(name, text, required=False), text
    assert not fits(name, call.replace("Bonn", "Rome"), required=False)
    assert not fits(name, f"{call}\n{call}", required=False, parallel=False)


def test_a_marker_that_is_spelled_is_no_free_text() -> None:
    at = matcher("HERMES", required=False)
    spelled = [token for letter in "<tool_call>" for token in ids_of("HERMES", letter)]
    assert all(at.push(token) for token in spelled[:-1])
    assert not at.push(spelled[-1])


def test_reasoning_comes_first() -> None:
    assert fits("THINKING", f"<think>\nso\n</think>\n\n{CALL}", required=True)
    assert fits("THINKING", CALL, required=True)
    assert fits("THINKING", f"so</think>{CALL}", required=True, in_reasoning=True)
    assert not fits("THINKING", CALL, required=True, in_reasoning=True)


def test_a_schema_holds_behind_the_reasoning_and_other_grammars_are_refused() -> None:
    form = form_of("THINKING")
    schema = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "boolean"}))
    texts = ("so\n</think>\n\ntrue", "</think>false", "true", "so</think>so")
    grammar = grammar_after_reasoning(form, schema)
    fitting = [takes(table_of("THINKING").compile(grammar), "THINKING", text) for text in texts]
    assert fitting == [True, True, False, False]
    with pytest.raises(Unsupported, match="structured_outputs: only JSON schemas"):
        grammar_after_reasoning(form, Grammar(GrammarKind.REGEX, "a"))


ANSWER = {
    "type": "object",
    "properties": {"note": {"type": "string", "pattern": "^[a-z ]{0,20}$"}, "ok": {"type": "boolean"}},
    "required": ["note"],
    "additionalProperties": False,
}
MARKED = json.dumps({"note": '<tool_call>\n{"name": "now"}'})
EITHER = CallRules(FUNCTIONS, required=False, parallel=True)


def either(name: str, answer: object = ANSWER, *, in_reasoning: bool = False) -> GrammarMatcher:
    schema = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(answer))
    return compiled(name, EITHER, in_reasoning=in_reasoning, answer=schema)


def read(name: str, text: str, *, in_reasoning: bool = False) -> list[ReplyDelta]:
    """In pieces of one character, as it streams."""
    return parsed(name, text, FUNCTIONS, in_reasoning=in_reasoning, calls_first=True)


@pytest.mark.parametrize(
    "name", ["HERMES", "LLAMA", "QWEN", "TABLE", *in_full("MISTRAL", "NAMED", "DEEPSEEK", "GLM")]
)
def test_whatever_is_drawn_is_an_answer_that_fits_or_calls_that_do(name: str) -> None:
    rng, kinds = random.Random(5), set()
    for _ in range(12):
        text = text_of(name, walk(either(name), name, rng))
        deltas = read(name, text)
        calls = [delta.tool_call for delta in deltas if delta.tool_call]
        assert len(calls) in (0, len(deltas)), text
        kinds.add(bool(calls))
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), FUNCTIONS[call.name])
        if not calls:
            jsonschema.validate(json.loads(deltas[0].content), ANSWER)
            assert (len(deltas), deltas[0].content) == (1, text)
    assert kinds == {True, False}


@pytest.mark.parametrize("name", ["HERMES", "TABLE"])
def test_an_answer_or_calls_and_nothing_beside_them(name: str) -> None:
    for text in ('{"note": "a"}', '{"note": "a",\n "ok": true}', CALL, f"{CALL}\n{CALL}"):
        assert takes(either(name), name, text), text
    for text in ("", "Well.", "{}", f"So. {CALL}", f'{{"note": "a"}}\n{CALL}', CALL.replace("Bonn", "Rome")):
        assert not takes(either(name), name, text), text


def test_a_marker_within_an_answer_is_part_of_it() -> None:
    assert read("HERMES", MARKED) == [ReplyDelta(content=MARKED)]
    assert [delta.tool_call is not None for delta in read("HERMES", f"\n{CALL}\n{CALL}")] == [True, True]
    assert read("LLAMA", '{"name": "Bonn", "note": 1}') == [ReplyDelta(content='{"name": "Bonn", "note": 1}')]


def test_reasoning_comes_before_either() -> None:
    for text in ('{"note": "a"}', CALL):
        assert takes(either("THINKING"), "THINKING", f"<think>so</think>\n{text}")
        assert takes(either("THINKING"), "THINKING", text)
        assert takes(either("THINKING", in_reasoning=True), "THINKING", f"so</think>\n{text}")
        assert not takes(either("THINKING", in_reasoning=True), "THINKING", text)
    assert read("THINKING", f"so</think>\n{MARKED}", in_reasoning=True) == [
        ReplyDelta(reasoning="so"),
        ReplyDelta(content=MARKED),
    ]


NAMED_ANSWER = {**ANSWER, "properties": {"name": {}, "note": {}}}


@pytest.mark.parametrize(
    ("answer", "apart"),
    [
        (ANSWER, True),
        (NAMED_ANSWER, True),
        ({"type": "array", "items": {}}, True),
        ({"$ref": "#/$defs/a", "$defs": {"a": ANSWER}}, True),
        ({"anyOf": [ANSWER, {"type": "null"}]}, True),
        ({"anyOf": [ANSWER, {"type": "object"}]}, False),
        ({"type": "object"}, False),
        ({**ANSWER, "properties": {"name": {}, "arguments": {}}}, False),
        ({**ANSWER, "patternProperties": {"^name$": {}}}, False),
        ({"$ref": "#/$defs/none"}, False),
        ({"$ref": "#"}, False),
    ],
)
def test_an_answer_beside_bare_json_calls_has_other_keys(answer: object, apart: bool) -> None:
    schema = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(answer))
    for name in ("HERMES", *(["LLAMA"] if apart else [])):
        assert call_grammar(form_of(name), EITHER, in_reasoning=False, answer=schema)
    if not apart:
        with pytest.raises(Unsupported, match="response_format: can't be told from calls"):
            call_grammar(form_of("LLAMA"), EITHER, in_reasoning=False, answer=schema)
