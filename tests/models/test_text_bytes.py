"""What a token adds to a text in bytes, parts of characters too, in each way that vocabularies write them."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from paceline.models.tokenizer import TableTokenizer, TransformersTokenizer
from tests.models.saving import byte_level_tokenizer

TEXT = "aé 😀\n\ufffd\t漢"


def by_byte_names() -> TransformersTokenizer:
    """As SentencePiece's vocabularies: letters, and bytes by their numbers for all others."""
    pieces = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "▁", "▁a"]
    inner = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [("▁", "a")], byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return TransformersTokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>"))


@pytest.mark.parametrize(
    "tokenizer",
    [TransformersTokenizer(byte_level_tokenizer()), by_byte_names(), TableTokenizer(300, 256)],
    ids=["letters", "numbers", "table"],
)
def test_the_bytes_of_tokens_join_to_those_of_the_text(tokenizer: TransformersTokenizer | TableTokenizer) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert b"".join(map(tokenizer.text_bytes, ids)) == TEXT.encode()
    assert any("\ufffd" in tokenizer.decode((i,)) for i in ids), "parts of a character are among them"
    (end,) = tokenizer.eos_token_ids
    assert tokenizer.text_bytes(end) == b""


def test_a_letter_of_a_table_model_is_its_text() -> None:
    tokenizer = TableTokenizer(97, 0)
    assert tokenizer.text_bytes(1) == tokenizer.decode((1,)).encode()
    assert tokenizer.text_bytes(0) == b""
