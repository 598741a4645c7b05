"""Spans of reasoning by token ids."""

from __future__ import annotations

import pytest

from paceline.models.reasoning import ReasoningMarks
from paceline.models.tokenizer import TableTokenizer
from tests.gateway.templates import OPENED, templated

OPENING, CLOSING, TURN = 10, 11, 12
MARKS = ReasoningMarks(OPENING, CLOSING, frozenset({TURN}))


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ((), False),
        ((1, 2), False),
        ((1, OPENING), True),
        ((1, OPENING, 3, 4), True),
        ((1, OPENING, CLOSING), False),
        ((OPENING, TURN, 2), False),
        ((TURN, OPENING, 2), True),
        ((CLOSING, OPENING), True),
    ],
)
def test_the_last_turn_says_whether_a_span_is_open(prompt: tuple[int, ...], is_open: bool) -> None:
    assert MARKS.open_behind(prompt) is is_open


def test_marks_belong_to_the_span() -> None:
    text = (1, OPENING, 2, CLOSING, 3, CLOSING, OPENING, OPENING, CLOSING)
    assert MARKS.inside(text, before=False) == [False, True, True, True, False, False, True, True, True]
    assert MARKS.inside((1, CLOSING, 2), before=True) == [True, True, False]


def test_marks_are_tokens_of_the_tokenizer() -> None:
    tokenizer = templated(OPENED)
    marks = ReasoningMarks.of(tokenizer)
    assert marks is not None
    assert [tokenizer.decode((each,)) for each in (marks.opening, marks.closing)] == ["<think>", "</think>"]
    assert marks.borders == set(tokenizer.hidden_tokens)
    assert marks.open_behind(tokenizer.render_turns([{"role": "user", "content": "why"}]))
    assert ReasoningMarks.of(TableTokenizer(300, None)) is None
