"""Spans of reasoning by token ids."""

from __future__ import annotations

import re

import pytest

from paceline.models.reasoning import ReasoningMarks, reasoning_marks
from paceline.models.tokenizer import TableTokenizer, TransformersTokenizer
from paceline_training.chat import closes_first
from tests.gateway.templates import OPENED, templated
from tests.models import saving

OPENING, CLOSING, TURN = 10, 11, 12
SPELLED = {OPENING: b"<t>", CLOSING: b"</t>"}
MARKS = ReasoningMarks(b"<t>", b"</t>", lambda token_id: SPELLED.get(token_id, b""), frozenset({TURN}))
NO_TOKENS = saving.templated(OPENED)
PIECES = (
    *["a", "<", "thi", "nk", ">", "</", ">b", "<think>", "x</think>y", "k>c<", "c</", "c<th", "<think>z</think>"],
    "",
)
IN_PIECES = ReasoningMarks(b"<think>", b"</think>", lambda place: PIECES[place].encode())


def inside(*pieces: str, before: bool = False) -> str:
    """What is inside spans of a text in these pieces; `|` between spans."""
    marked = IN_PIECES.span_mask([PIECES.index(piece) for piece in pieces], is_open=before)
    kept = (piece if is_inside else "|" for piece, is_inside in zip(pieces, marked, strict=True))
    return re.sub(r"\|+", "|", "".join(kept)).strip("|")


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ((), False),
        ((1, OPENING, 3, 4), True),
        ((1, OPENING, CLOSING), False),
        ((OPENING, TURN, 2), False),
        ((TURN, OPENING, 2), True),
        ((CLOSING, OPENING), True),
    ],
)
def test_the_last_turn_says_whether_a_span_is_open(prompt: tuple[int, ...], is_open: bool) -> None:
    assert MARKS.follow(prompt).is_open is is_open


def test_marks_belong_to_the_span() -> None:
    text = (1, OPENING, 2, CLOSING, 3, CLOSING, OPENING, OPENING, CLOSING)
    assert MARKS.span_mask(text, is_open=False) == [False, True, True, True, False, False, True, True, True]
    assert MARKS.span_mask((1, CLOSING, 2), is_open=True) == [True, True, False]


def test_marks_are_tokens_of_the_tokenizer() -> None:
    tokenizer = templated(OPENED)
    marks = reasoning_marks(tokenizer)
    assert marks is not None
    assert (marks.opening, marks.closing) == (b"<think>", b"</think>")
    assert [i for i in range(tokenizer.vocab_size) if marks.spelling(i)] == [*tokenizer.encode("<think></think>")]
    assert marks.borders == set(tokenizer.hidden_tokens)
    assert marks.follow(tokenizer.render_turns([{"role": "user", "content": "why"}])).is_open
    assert reasoning_marks(TableTokenizer(300, None)) is None


def test_without_such_tokens_marks_are_what_the_template_knows_in_any_tokens() -> None:
    marks = reasoning_marks(NO_TOKENS)
    assert marks is not None
    asked = NO_TOKENS.render_turns([{"role": "user", "content": "why"}])
    assert marks.follow(asked).is_open
    assert not marks.follow((*asked, *NO_TOKENS.encode("so</think>"))).is_open
    quoting = NO_TOKENS.render_turns([{"role": "user", "content": "<think>"}])
    assert not marks.follow(quoting[: -len("<think>\n")]).is_open, "a user's turn opens nothing"
    text = NO_TOKENS.encode("it</think>is<think>not")
    assert NO_TOKENS.decode(
        [each for each, of in zip(text, marks.span_mask(text, is_open=True), strict=True) if of]
    ) == ("it</think><think>not")
    assert (closes_first(marks, text), closes_first(marks, text[12:])) == (True, False)
    plain = TransformersTokenizer(saving.byte_level_tokenizer())
    assert reasoning_marks(plain) is None, "its template knows of none"


@pytest.mark.parametrize(
    ("pieces", "within"),
    [
        (("a", "<think>", "a", "x</think>y", "a"), "<think>ax</think>y"),
        (("a", "<", "thi", "nk", ">", "a"), "<think>a"),
        (("a", "c<th", "a", "<", "thi", "nk", ">"), "<think>"),
        (("c<th", "a"), ""),
        (("<", "", "thi", "nk", ">", "a"), ""),
        (("a", "<think>", "c</", "thi", "k>c<", "</", "thi", "nk", ">b", "a"), "<think>c</thik>c<</think>b"),
        (("<think>", "a", "</", "thi", "k>c<", "a"), "<think>a</thik>c<a"),
        (("a", "<think>z</think>", "a"), "<think>z</think>"),
    ],
)
def test_marks_of_several_tokens_take_every_token_that_has_a_part_of_them(
    pieces: tuple[str, ...], within: str
) -> None:
    assert inside(*pieces) == within
