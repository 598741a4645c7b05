"""What kind of text a token is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from paceline.models.tokenizer import TableTokenizer, TransformersTokenizer
from paceline_training.corpus import Role, Row
from paceline_training.text_kinds import CELLS, TextKinds, TokenKind, kind_of
from tests.models.saving import byte_level_tokenizer

BYTES = TableTokenizer(300, None)


@pytest.mark.parametrize(
    ("text", "before", "kind"),
    [
        (" the", "of", TokenKind.WORD_START),
        ("the", " of", TokenKind.WORD_INSIDE),
        ("s", "9", TokenKind.WORD_INSIDE),
        ("the", "(", TokenKind.WORD_START),
        ("the", "", TokenKind.WORD_START),
        ("Übung", "\n", TokenKind.WORD_START),
        ("\n\n", ".", TokenKind.SPACE),
        (" 12", "is", TokenKind.NUMBER),
        (").", "x", TokenKind.PUNCTUATION),
        ("_name", "my", TokenKind.PUNCTUATION),
        ("", "x", TokenKind.SPECIAL),
    ],
)
def test_kinds(text: str, before: str, kind: TokenKind) -> None:
    assert kind_of(text, before) is kind


def cells_of(text: str, roles: Sequence[int] = ()) -> dict[str, str]:
    """The cell of each byte but the first, by its place; `roles`: of all bytes."""
    tokens = np.array(BYTES.encode(text), np.int32)
    given = np.array(roles or [Role.ANSWER] * tokens.size, np.int8)
    cells = TextKinds(BYTES).cells(Row(tokens, given, 0.0))
    return {
        f"{place}{text[place]}": cell for place, cell in zip(np.flatnonzero(given[1:] >= 2) + 1, cells, strict=True)
    }


def test_text_between_fences_is_code() -> None:
    found = cells_of("a b```x 1```c")
    assert found["2b"] == "text/word start"
    assert found["5`"] == "text/punctuation"
    assert found["6x"] == "code/word start"
    assert found["81"] == "code/number"
    assert found["9`"] == "code/punctuation", "the closing fence stands inside"
    assert found["12c"] == "text/word start"


def test_four_marks_are_one_fence_and_the_prompt_s_do_not_count() -> None:
    assert cells_of("a````b")["5b"] == "code/word start"
    asked = [Role.USER] * 4 + [Role.ANSWER] * 3
    assert cells_of("```qx y", asked)["6y"] == "text/word start"
    assert [*cells_of("```qx y", asked)] == ["4x", "5 ", "6y"], "learned tokens alone"


def test_reasoning_is_a_part_of_its_own() -> None:
    roles = [Role.ANSWER, Role.THINKING, Role.THINKING, Role.ANSWER]
    assert [*cells_of("abcd", roles).values()] == ["reasoning/word inside"] * 2 + ["text/word inside"]


def test_special_tokens_have_no_text_and_end_words() -> None:
    tokenizer = TransformersTokenizer(byte_level_tokenizer())
    tokens = np.array([*tokenizer.encode("ab"), 1, *tokenizer.encode("c")], np.int32)
    row = Row(tokens, np.full(tokens.size, Role.ANSWER, np.int8), 0.0)
    assert TextKinds(tokenizer).cells(row)[-3:] == ["text/word inside", "text/special", "text/word start"]
    assert set(TextKinds(tokenizer).cells(row)) <= set(CELLS)
