"""Where the tokens of an echoed prompt begin in its text."""

from __future__ import annotations

from paceline.models.tokenizer import TransformersTokenizer
from paceline.protocol.generation import PromptLogprobs
from paceline.protocol.target import RowLogprobs
from paceline_gateway.openai.logprobs import MAX_PENDING_TOKENS, PromptEcho
from tests.models.saving import byte_level_tokenizer

TOKENIZER = TransformersTokenizer(byte_level_tokenizer())
END = 1


def offsets(ids: tuple[int, ...]) -> list[int]:
    echoed = PromptEcho(ids, TOKENIZER)
    rows = tuple(RowLogprobs((token,), (-1.0,)) for token in ids[1:])
    found: list[int] = echoed.first()["text_offset"]
    for start in range(0, len(rows), 3):
        found += echoed.rows(PromptLogprobs(1 + start, rows[start : start + 3]))["text_offset"]
    return found


def test_tokens_of_one_character_begin_where_it_begins() -> None:
    ids = TOKENIZER.encode("aé😀b", add_special_tokens=False)
    assert len(ids) == 1 + 2 + 4 + 1
    assert offsets(ids) == [0, 1, 1, 2, 2, 2, 2, 3]


def test_special_tokens_have_no_text_however_many_there_are() -> None:
    ids = (END,) * (3 * MAX_PENDING_TOKENS) + TOKENIZER.encode("ab", add_special_tokens=False)
    assert offsets(ids) == [0] * (3 * MAX_PENDING_TOKENS + 1) + [1]
