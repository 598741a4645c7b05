"""Calls whose arguments are written one by one: what they become as JSON, and what a grammar of them holds to."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.protocol.errors import InvalidInput, Unsupported
from paceline.sampling.grammar import GrammarMatcher
from paceline_gateway.reply.call_grammar import CallRules
from paceline_gateway.reply.deltas import ReplyDelta
from paceline_gateway.reply.parameter_values import json_of, types_of
from paceline_gateway.reply.parser import reply_parser
from paceline_gateway.reply.template_probes import read_arguments
from tests.gateway import replies
from tests.gateway.replies import compiled, form_of, takes

STRING, MAYBE = {"type": "string"}, {"anyOf": [{"type": "string"}, {"type": "null"}]}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": STRING,
        "days": {"type": "integer"},
        "dry": {"type": "boolean"},
        "tags": {"type": "array", "items": STRING},
        "note": MAYBE,
        "free": {},
    },
    "required": ["city"],
}
FUNCTIONS = {"get_weather": SCHEMA, "now": {"type": "object", "properties": {}}}
QWEN_CALL = "<tool_call>\n<function=get_weather>\n{}</function>\n</tool_call>"
GLM_CALL = "<tool_call>get_weather{}\n</tool_call>"


def in_qwen(**values: str) -> str:
    return QWEN_CALL.format("".join(f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in values.items()))


def in_glm(**values: str) -> str:
    pairs = (f"\n<arg_key>{name}</arg_key>\n<arg_value>{text}</arg_value>" for name, text in values.items())
    return GLM_CALL.format("".join(pairs))


def parsed(pieces: Iterable[str], name: str = "QWEN") -> list[ReplyDelta]:
    return replies.parsed(name, pieces, FUNCTIONS)


def arguments(text: str, name: str = "QWEN") -> Any:
    """Of the one call that a reply is."""
    (delta,) = parsed([text], name)
    assert delta.tool_call is not None and (delta.tool_call.name, delta.tool_call.id) == ("get_weather", "id1")
    return json.loads(delta.tool_call.arguments)


@pytest.mark.parametrize(("written", "name"), [(in_qwen, "QWEN"), (in_glm, "GLM")])
def test_arguments_are_json_by_their_schemas(written: Any, name: str) -> None:
    values = {"city": "12", "days": "3", "dry": "True", "tags": '["a", "b"]', "note": "None", "free": '{"a": 1}'}
    expected = {"city": "12", "days": 3, "dry": True, "tags": ["a", "b"], "note": None, "free": {"a": 1}}
    assert arguments(written(**values), name) == expected
    strings = {"days": "many", "note": "12", "free": "a b", "unknown": "NaN"}
    odd = {"city": 'a "b" \\ é <\n\n x', "dry": "false"} | strings
    assert arguments(written(**odd), name) == odd | {"dry": False}
    assert arguments(written(), name) == {}


@pytest.mark.parametrize(
    "text", ["", "a", "\n", "\na\n", " a ", "<", "</", "</parameter", "<parameter=x>", "\n</b>"], ids=ascii
)
def test_a_string_loses_nothing_but_the_lines_around_it(text: str) -> None:
    assert arguments(in_qwen(city=text)) == {"city": text}


def test_white_space_and_the_last_tag_may_be_others() -> None:
    for text in (
        "<tool_call><function=get_weather><parameter=city>Bonn</parameter></function></tool_call>",
        "<tool_call>\n\n<function=get_weather>\n  <parameter=city>\nBonn</parameter>\n\n</function>\n",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nBonn\n</parameter>\n</function>",
    ):
        assert arguments(text) == {"city": "Bonn"}, text


def test_a_string_streams_and_what_may_be_its_end_waits() -> None:
    parser = reply_parser(form_of("QWEN"), FUNCTIONS, new_id=lambda: "id")
    pieces = ("<tool_call>\n<function=get_weather>", "\n<parameter=city>\nBo", "nn\n", "x</par", "ameter>")
    streamed = [
        "".join(delta.tool_call.arguments for delta in parser.feed(each) if delta.tool_call) for each in pieces
    ]
    assert streamed == ["{", '"city": "Bo', "nn", "\\nx", '"']


def test_several_calls_and_text_around_them() -> None:
    text = f"So.\n{in_qwen(city='Bonn')}\n<tool_call>\n<function=now>\n</function>\n</tool_call>Done"
    deltas = parsed(list(text))
    assert [delta.content for delta in deltas if delta.content] == ["So.", "Done"]
    calls = [delta.tool_call for delta in deltas if delta.tool_call]
    weather, now = [(call.index, call.name, call.arguments) for call in calls]
    assert (weather, now) == ((0, "get_weather", '{"city": "Bonn"}'), (1, "now", "{}"))


@pytest.mark.parametrize(
    ("text", "expected", "content"),
    [
        ("<tool_call> is a tag", "", "<tool_call> is a tag"),
        ('<tool_call>{"name": "now"}</tool_call>', "", '<tool_call>{"name": "now"}</tool_call>'),
        ("<tool_call>", "", "<tool_call>"),
        ("<tool_call>\n<function=now>\nWell", "{}", "\nWell"),
        ("<tool_call>\n<function=get_weather>\n<parameter=city>\nBo\n</pa", '{"city": "Bo\\n</pa', ""),
        ("<tool_call>\n<function=get_weather>\n<parameter=days>\n12", '{"days": 12', ""),
        ("<tool_call>\n<function=now>\n</function>\nDone", "{}", "\nDone"),
        ("<tool_call>\n<function=now>\n<parameter=" + "x" * 300, "{}", "\n<parameter=" + "x" * 300),
    ],
)
def test_what_is_no_call_or_breaks_off_stays_as_it_came(text: str, expected: str, content: str) -> None:
    deltas = parsed([text])
    assert "".join(delta.tool_call.arguments for delta in deltas if delta.tool_call) == expected
    assert "".join(delta.content for delta in deltas) == content


PIECES = ["<tool_call>", "</tool_call>", "<function=", "get_weather", ">", "<parameter=", "city", "days"]
ODD = ["</parameter>", "</function>", "\n", " ", '"', "\\", "<", "12", "é", in_qwen(city="x")]


@given(st.lists(st.sampled_from(PIECES + ODD), max_size=16), st.data())
def test_the_cut_into_pieces_decides_nothing(pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    assert parsed([text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]) == parsed([text])


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"enum": ["a", 1, 1.5, None, True]}, {"string", "integer", "number", "null", "boolean"}),
        ({"const": {}}, {"object"}),
        ({"oneOf": [{"type": "array"}, {"$ref": "#/x"}]}, set()),
        ({"type": 5, "enum": 7}, set()),
        ({"anyOf": 5}, set()),
        (True, set()),
    ],
)
def test_types_are_what_a_schema_says_itself(schema: object, types: set[str]) -> None:
    assert types_of(schema) == types


@pytest.mark.parametrize(("text", "value"), [("1e3", "1e3"), ("12", "12"), ("Infinity", '"Infinity"'), ("[", '"["')])
def test_numbers_keep_their_digits_and_no_others_are_made(text: str, value: str) -> None:
    assert json_of(text, frozenset({"number"})) == value


def test_another_way_to_write_arguments_is_not_taken_for_this_one() -> None:
    probes = ("a", "1", "b", "2")
    assert read_arguments(">()", ">(a=1, b=2)", probes) is None
    assert read_arguments("></f>", "><p a>1</p><p b>2</q></f>", probes) is None
    assert read_arguments("></f>", "no argument", probes) is None


def matcher(schema: dict[str, Any], name: str = "QWEN", *, required: bool = True) -> GrammarMatcher:
    return compiled(name, CallRules({"get_weather": schema}, required=required, parallel=True))


def fits(schema: dict[str, Any], text: str) -> bool:
    return takes(matcher(schema), "QWEN", text)


def test_a_grammar_holds_each_argument_to_its_schema() -> None:
    assert fits(SCHEMA, in_qwen(city="any <b> text,\nlines too", days="3", dry="true", note="x"))
    assert fits(SCHEMA, in_qwen(city="", free='{"a": [1]}'))
    assert fits(SCHEMA, f"{in_qwen(city='a')}\n{in_qwen(city='b')}")
    assert not fits(SCHEMA, in_qwen(days="3"))
    assert not fits(SCHEMA, in_qwen(city="a", days="x"))
    assert not fits(SCHEMA, in_qwen(city="a", other="x"))
    assert not fits(SCHEMA, f"Well. {in_qwen(city='a')}")
    assert takes(matcher(SCHEMA, required=False), "QWEN", f"Well. {in_qwen(city='a')}")
    listed = {"type": "object", "properties": {"kind": {"enum": ["a b", "c"]}}}
    assert [fits(listed, in_qwen(kind=text)) for text in ("a b", "c", "d", '"c"')] == [True, True, False, False]


@pytest.mark.parametrize(
    ("schema", "error", "match"),
    [
        ({"properties": {"a": STRING | {"pattern": "x"}}}, Unsupported, "properties.a.pattern: can't be kept"),
        ({"properties": {"a": STRING}, "minProperties": 1}, Unsupported, "get_weather.parameters.minProperties"),
        ({"required": ["a"]}, Unsupported, "parameters.required: names a property that isn't listed"),
        ({"required": "a"}, InvalidInput, "parameters.required = 'a': must be a list"),
        ({"properties": {"a>": STRING}}, Unsupported, "'a>' can't be written"),
        ({"properties": {"a": {"enum": ["x", 1]}}}, Unsupported, "properties.a: these values can't be told apart"),
        ({"properties": {"a": {"const": "</parameter>"}}}, Unsupported, "properties.a: these values"),
        ({"properties": {"a": {"anyOf": [STRING | {"maxLength": 2}, {"type": "null"}]}}}, Unsupported, "a.maxLength"),
        ({"properties": {"a": {"oneOf": [STRING, {"type": "null"}]}}}, Unsupported, "a.oneOf"),
        ({"properties": {"a": {**STRING, **MAYBE}}}, Unsupported, "a: anyOf and type: can't both be kept"),
    ],
)
def test_what_can_t_be_kept_is_refused_by_name(schema: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        matcher({"type": "object"} | schema)


@pytest.mark.parametrize(("name", "written"), [("QWEN", in_qwen), ("GLM", in_glm)])
def test_whatever_text_there_is_comes_back(name: str, written: Any) -> None:
    rng = random.Random(3)
    for _ in range(40):
        text = "".join(rng.choice('ab<>/ "\n{}1\\') for _ in range(6))
        values = arguments(written(city=text, days=str(rng.randint(-9, 9)), note=text), name)
        jsonschema.validate(values, SCHEMA)
        assert (values["city"], values["note"]) == (text, text)
