"""Round trips, bytes of tokens in each way that vocabularies write them, special tokens, chat, the fingerprint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from paceline.models.tokenizer import TableTokenizer, TransformersTokenizer, load_tokenizer
from paceline.models.vocabulary import fingerprint_of, vocabulary_fingerprint
from paceline.protocol.errors import InvalidInput, Unsupported
from paceline.protocol.generation import ChatMessage
from tests.models.saving import byte_level_tokenizer, letter_tokenizer

TEXTS = st.text(st.characters(codec="utf-8"), max_size=40)


@given(TEXTS)
def test_bytes_round_trip(text: str) -> None:
    tokenizer = load_tokenizer("table:vocab=300")
    ids = tokenizer.encode(text)
    assert ids == tuple(text.encode())
    assert tokenizer.decode(ids) == text


@given(TEXTS)
def test_byte_level_bpe_round_trips(text: str) -> None:
    tokenizer = TransformersTokenizer(byte_level_tokenizer())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_ids_are_skipped_and_broken_bytes_replaced() -> None:
    tokenizer = load_tokenizer("table:vocab=300")
    assert tokenizer.eos_token_ids == {256}
    assert tokenizer.decode((72, 256, 105, 299)) == "Hi"
    assert tokenizer.decode("é".encode()[:1]) == "\ufffd"
    assert tokenizer.decode(tokenizer.render_chat((ChatMessage("user", "hi"),))) == "user: hi\nassistant: "


def test_letters_round_trip_and_any_text_can_be_read() -> None:
    tokenizer = load_tokenizer("table:vocab=40,eos=3")
    text = tokenizer.decode(range(40))
    assert len(text) == 39
    assert tokenizer.encode(text) == tuple(i for i in range(40) if i != 3)
    assert tokenizer.encode("abc") == (0, 1, 2)
    assert all(0 <= i < 40 and i != 3 for i in tokenizer.encode("d, Hello, Wörld! 123 +"))
    assert tokenizer.eos_token_ids == {3}
    assert tokenizer.text_bytes(1) == tokenizer.decode((1,)).encode()
    assert tokenizer.text_bytes(3) == b""
    small = load_tokenizer("table:vocab=40")
    assert (small.eos_token_ids, small.vocab_size) == (frozenset(), 40), "it ends nothing unless told"


def test_fingerprints_tell_vocabularies_apart() -> None:
    names = ("table:vocab=40", "table:vocab=41", "table:vocab=40,eos=3", "table:vocab=300")
    assert len({load_tokenizer(name).fingerprint for name in names}) == 4
    assert load_tokenizer("table:vocab=40").fingerprint == load_tokenizer("table:vocab=40,seed=9").fingerprint
    assert vocabulary_fingerprint({"a": 1, "b": 2}) == vocabulary_fingerprint([("b", 2), ("a", 1)])
    assert vocabulary_fingerprint({"a": 1, "b": 2}) != vocabulary_fingerprint({"a": 2, "b": 1})
    assert vocabulary_fingerprint({"ab": 1}) != vocabulary_fingerprint({"a": 1})


def test_padding_of_a_converted_vocabulary_is_none_of_it() -> None:
    tokens = {"a": 0, "b": 1, "c": 2}
    padded = tokens | {"[PAD3]": 3, "[PAD4]": 4}
    assert fingerprint_of(padded.items(), 8) == fingerprint_of(tokens.items(), 8)
    assert fingerprint_of(tokens.items(), 8) != fingerprint_of((tokens | {"[PAD3]": 4}).items(), 8), (
        "a token of that name elsewhere"
    )
    assert fingerprint_of(tokens.items(), 2).vocab_size == 2


def test_a_folder_gives_its_tokenizer_chat_and_end_ids(tmp_path: Path) -> None:
    byte_level_tokenizer(extra=4).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 258]}')
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.vocab_size == 262
    assert tokenizer.eos_token_ids == {1, 258}
    ids = tokenizer.render_chat((ChatMessage("system", "é"), ChatMessage("user", "hi")))
    assert ids.count(0) == 3
    assert ids.count(1) == 2
    assert tokenizer.decode(ids) == "system:éuser:hiassistant:"


def test_what_a_folder_or_a_model_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="no chat template"):
        TransformersTokenizer(letter_tokenizer(10)).render_chat((ChatMessage("user", "a"),))
    with pytest.raises(InvalidInput, match="a model with a tokenizer"):
        load_tokenizer(str(tmp_path))


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


@pytest.mark.real_model
def test_services_that_compute_nothing_read_a_tokenizer_without_torch() -> None:
    code = (
        "import sys, coordinator.__main__ as coordinator, paceline_gateway.__main__ as gateway\n"
        "for service in (coordinator, gateway):\n"
        "    assert sys.modules.pop('torch', None) is None\n"
        "    service.run_service = lambda *_: None\n"
        "    service.main()\n"
        "    assert sys.modules['torch'] is None\n"
        "from paceline.models.tokenizer import load_tokenizer\n"
        "from paceline.protocol.generation import ChatMessage\n"
        "read = load_tokenizer('smollm2-135m')\n"
        "ids = read.render_chat((ChatMessage('user', 'Grüß dich'),))\n"
        "print(read.fingerprint, sorted(read.eos_token_ids), list(ids))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    own = load_tokenizer("smollm2-135m")
    ids = own.render_chat((ChatMessage("user", "Grüß dich"),))
    assert done.stdout.split() == f"{own.fingerprint} {sorted(own.eos_token_ids)} {list(ids)}".split()
    assert not done.stderr, "nothing is said about a library that is left out"
