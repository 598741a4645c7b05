"""A reply in its parts: what each format's text becomes, and that the cut into pieces decides nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_gateway.reply.deltas import ReplyDelta, ToolCallDelta, join_deltas
from paceline_gateway.reply.format import opens_reasoning
from paceline_gateway.reply.parser import MarkedReply, call_reader, reply_parser
from tests.gateway import replies
from tests.gateway.replies import form_of, tokenizer_of

FUNCTIONS = ("get_weather", "add")
NAMES = ("HERMES", "THINKING", "OPENED", "LLAMA", "MISTRAL", "NAMED", "DEEPSEEK", "QWEN", "GLM")
WEATHER = '{"city": "Bonn", "note": "a \\"}\\" in it"}'
MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]
DEEP = ["<|calls|>", "<|call|>function<|sep|>", "\n```json\n", "\n```<|end|>", "<|ends|>"]
JSON = ['{"name": "', "get_weather", '", "arguments": ', '", "parameters": ', WEATHER, "{}", "}", "]", "[", ", ", '"']
PIECES = [*MARKS, *DEEP, *JSON, '{"arguments": {}, "name": "add"}', " ", "\n", "<", "Hi é"]


def parsed(name: str, pieces: Iterable[str], *, in_reasoning: bool = False) -> list[ReplyDelta]:
    return replies.parsed(name, pieces, FUNCTIONS, in_reasoning=in_reasoning)


def call(index: int, name: str, arguments: str) -> ReplyDelta:
    return ReplyDelta(tool_call=ToolCallDelta(index, f"id{index + 1}", name, arguments))


def content(text: str) -> ReplyDelta:
    return ReplyDelta(content=text)


def said(delta: ReplyDelta) -> str:
    called = delta.tool_call
    return f"{delta.content}{delta.reasoning}{called.name + called.arguments if called else ''}"


@settings(deadline=None)
@given(st.sampled_from(NAMES), st.lists(st.sampled_from(PIECES), max_size=12), st.booleans(), st.data())
def test_the_cut_into_pieces_decides_nothing(name: str, pieces: list[str], thinks: bool, data: st.DataObject) -> None:
    text = "".join(pieces)
    in_reasoning = thinks and form_of(name).reasoning is not None
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    cut = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert parsed(name, cut, in_reasoning=in_reasoning) == parsed(name, [text], in_reasoning=in_reasoning)


@given(
    st.sampled_from(NAMES),
    st.lists(st.sampled_from([" ", "\n", "<", "Hi é", "a", "<t", "[T", "{", "tool"]), max_size=12),
)
def test_text_without_a_marker_is_content_to_the_last_character(name: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    assert "".join(delta.content for delta in parsed(name, pieces)) == text


@settings(deadline=None)
@given(st.sampled_from(NAMES), st.lists(st.sampled_from([*PIECES, "w", "w", "w"]), max_size=12), st.booleans())
def test_every_word_comes_out(name: str, pieces: list[str], thinks: bool) -> None:
    """None may vanish, whatever stands around it, but in further keys of a call's object."""
    words = [f"w{place}w" if piece == "w" else "" for place, piece in enumerate(pieces)]
    text = "".join(word or piece for word, piece in zip(words, pieces, strict=True) if piece != ", ")
    deltas = parsed(name, [text], in_reasoning=thinks and form_of(name).reasoning is not None)
    out = "".join(said(delta) for delta in deltas)
    assert all(word in out for word in words)


HERMES_CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>'
MISTRALS = '{"name": "add", "arguments": {}, "id": "123456789"}'
DEEPSEEKS = "<|call|>function<|sep|>{}\n```json\n{}\n```<|end|>"
EXPECTED = {
    "HERMES": HERMES_CALL + '\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>',
    "THINKING": HERMES_CALL + '<tool_call>{"name":"add","arguments":{}}</tool_call>',
    "MISTRAL": f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {WEATHER}}}, {MISTRALS}]',
    "NAMED": f"[TOOL_CALLS]get_weather[ARGS]{WEATHER}[TOOL_CALLS]add[ARGS]{{}}",
    "DEEPSEEK": f"<|calls|>{DEEPSEEKS.format('get_weather', WEATHER)}\n{DEEPSEEKS.format('add', '{}')}<|ends|>",
}


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("said", ["", "Let me see."])
def test_calls_in_each_format(name: str, said: str) -> None:
    text = f"{said}\n{EXPECTED[name]}" if said else EXPECTED[name]
    calls = [call(0, "get_weather", WEATHER), call(1, "add", "{}")]
    assert parsed(name, list(text)) == [*([content(said)] if said else []), *calls]


@pytest.mark.parametrize("tag", ["", "<|python_tag|>", "\n"])
@pytest.mark.parametrize("kind", ["", '"type": "function", '])
@pytest.mark.parametrize("key", ["parameters", "arguments"])
def test_llama_s_bare_json(tag: str, kind: str, key: str) -> None:
    text = f'{tag}{{{kind}"name": "get_weather", "{key}": {WEATHER}}}'
    assert parsed("LLAMA", [text]) == [call(0, "get_weather", WEATHER)]


NO_CALLS = {
    "LLAMA": ['{"name": "Ann", "parameters": {}}', 'See {"name": "add", "parameters": {}}', '{"a": 1}'],
    "HERMES": [
        f"So: <tool_call>\n{body}\n</tool_call> and on"
        for body in ("not JSON", '{"name": 7}', '{"name": "add", "arguments": 7}', '{"name": "add"', "[]")
    ],
}
ADDED = {
    '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>': '{"a": 1}',
    '<tool_call>{"name": "add"}</tool_call>': "{}",
    '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>': '{"a": 1}',
    '<tool_call>{"id": 7, "name": "add", "parameters": null}</tool_call>': "{}",
    '<tool_call>\n{"name": "add", "arguments": {"a": "lon': '{"a": "lon',
}
"""Keys in other orders, and a call that is cut off: its arguments."""


@pytest.mark.parametrize(
    ("name", "text", "delta"),
    [(name, text, content(text)) for name, texts in NO_CALLS.items() for text in texts]
    + [("HERMES", text, call(0, "add", arguments)) for text, arguments in ADDED.items()],
)
def test_a_reply_is_one_call_or_content_whole(name: str, text: str, delta: ReplyDelta) -> None:
    assert parsed(name, list(text)) == [delta]


def test_arguments_stream_as_they_come() -> None:
    parser = reply_parser(form_of("HERMES"), FUNCTIONS)
    parser.feed('<tool_call>\n{"name": "add", "arguments": ')
    assert [d.tool_call.arguments for d in parser.feed('{"a": ') if d.tool_call] == ['{"a": ']
    assert [d.tool_call.arguments for d in parser.feed("12") if d.tool_call] == ["12"]


def test_only_what_may_become_a_marker_waits() -> None:
    parser = reply_parser(form_of("HERMES"), FUNCTIONS)
    assert parser.feed("a < b") == [content("a < b")]
    assert parser.feed(" <tool") == []
    assert parser.feed("box") == [content(" <toolbox")]
    assert parser.feed(" " * 300) != []


@pytest.mark.parametrize("opened", [True, False])
def test_reasoning_is_split_where_the_template_has_it(opened: bool) -> None:
    name = "OPENED" if opened else "THINKING"
    tokenizer = tokenizer_of(name)
    prompt = tokenizer.render_turns([{"role": "user", "content": "<think>"}])
    assert opens_reasoning(tokenizer, prompt, form_of(name).reasoning) is opened
    text = ("" if opened else "<think>") + "\nfirst\n\n</think>\n\nThen </think> this."
    deltas = parsed(name, list(text), in_reasoning=opened)
    assert deltas == [ReplyDelta(reasoning="first"), content("Then </think> this.")]


def test_reasoning_then_a_call() -> None:
    deltas = parsed("OPENED", [f"why\n</think>\n\n{HERMES_CALL}"], in_reasoning=True)
    assert deltas == [ReplyDelta(reasoning="why"), call(0, "get_weather", WEATHER)]


class Forgetful(MarkedReply):
    """A mutant: it takes the end of each piece for the end of the reply."""

    def feed(self, text: str) -> list[ReplyDelta]:
        return [*super().feed(text), *self.finish()]


def test_a_parser_that_forgets_between_pieces_is_caught() -> None:
    results = []
    for pieces in ([HERMES_CALL], [HERMES_CALL[:5], HERMES_CALL[5:]]):
        reader = call_reader(form_of("HERMES").require_calls(), FUNCTIONS, lambda: "id1")
        mutant = Forgetful(reader, None, in_reasoning=False, must_call=False, calls_first=False)
        results.append(join_deltas(delta for piece in pieces for delta in mutant.feed(piece)))
    assert results[0] == [call(0, "get_weather", WEATHER)] != results[1]
