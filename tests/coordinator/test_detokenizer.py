from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.text.detokenizer import Detokenizer
from paceline.models.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer("table:vocab=300")
PROMPT = tuple(b"Say: ")


def stream(data: bytes, stop: tuple[str, ...] = ()) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(TOKENIZER, PROMPT, stop)
    pieces = []
    for token in data:
        if detokenizer.stopped:
            break
        pieces.append(detokenizer.push(token))
    return pieces, detokenizer


def test_a_character_comes_out_whole() -> None:
    pieces, _ = stream("a€b".encode())
    assert pieces == ["a", "", "", "€", "b"]


@given(st.text("aé€😀 \n\u0301", max_size=40))  # of one to four bytes
def test_pieces_join_to_the_text(text: str) -> None:
    pieces, detokenizer = stream(text.encode())
    assert "".join(pieces) + detokenizer.flush() == text


@given(st.binary(max_size=40), st.integers(0, 40))
def test_replaying_a_prefix_joins_at_the_same_character(data: bytes, cut: int) -> None:
    pieces, whole = stream(data)
    expected = "".join(pieces) + whole.flush()
    before, _ = stream(data[:cut])
    after, replayed = stream(data)
    assert "".join(before) + "".join(after[len(data[:cut]) :]) + replayed.flush() == expected


@pytest.mark.parametrize("stop", ["END", "D"])
def test_a_stop_string_across_tokens_is_never_shown(stop: str) -> None:
    pieces, detokenizer = stream(b"the END of it", (stop,))
    assert detokenizer.stopped
    assert "".join(pieces) == "the END".removesuffix(stop)
    assert detokenizer.flush() == ""


def test_text_that_only_looks_like_a_stop_is_released() -> None:
    pieces, detokenizer = stream(b"ENx EN", ("END",))
    assert "".join(pieces) == "ENx "
    assert detokenizer.flush() == "EN"


def test_stop_strings_wait_for_the_fewest_tokens() -> None:
    detokenizer = Detokenizer(TOKENIZER, PROMPT, ("ab",))
    pieces = [detokenizer.push(token, may_stop=index > 4) for index, token in enumerate(b"abxababab", start=1)]
    # "ab" lies before the fifth token, then across it, then behind it.
    assert "".join(pieces) == "abxab"
    assert detokenizer.stopped
