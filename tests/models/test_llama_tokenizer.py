"""llama.cpp's own tokenizer, held to the tokenizers library's on files that both read."""

from __future__ import annotations

import random
import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from paceline.models.gguf_config import end_ids
from paceline.models.gguf_header import read_header
from paceline.models.gguf_tokenizer import file_tokenizer
from paceline.models.llama_tokenizer import GgufTokenizer
from paceline.models.resolve import kept_gguf
from paceline.models.token_texts import cutter
from paceline.models.tokenizer import Tokenizer, TransformersTokenizer, load_tokenizer
from paceline.protocol.errors import InvalidInput, Unsupported
from paceline.protocol.generation import ChatMessage
from tests.models import gguf_files, llama_cpp
from tests.models.gguf_files import HIDDEN, values
from tests.models.test_gguf import PIECES, SENTENCEPIECE, TEXTS, WHOLE

CHATS: tuple[Sequence[ChatMessage], ...] = (
    (ChatMessage("user", "hello the 12"),),
    (
        ChatMessage("system", "be  brief\n"),
        ChatMessage("user", "日本 🙂"),
        ChatMessage("assistant", "the"),
        ChatMessage("user", "?"),
    ),
)


def both(file: Path) -> tuple[TransformersTokenizer, TransformersTokenizer]:
    """By llama.cpp, and by the tokenizers library."""
    header = read_header(file)
    return (
        TransformersTokenizer(GgufTokenizer(header), end_ids(header)),
        TransformersTokenizer(file_tokenizer(header), end_ids(header)),
    )


def compare(own: Tokenizer, other: Tokenizer, texts: Sequence[str]) -> None:
    """Facts, ids, texts and bytes; of parts of texts, too, which may begin and end within a character."""
    assert (own.vocab_size, own.fingerprint) == (other.vocab_size, other.fingerprint)
    assert own.eos_token_ids == other.eos_token_ids
    assert own.max_token_bytes == other.max_token_bytes
    assert own.hidden_tokens == other.hidden_tokens
    assert own.added_tokens == other.added_tokens
    assert own.template_variables == other.template_variables
    generator = random.Random(0)
    for text in texts:
        ids = own.encode(text)
        assert ids == other.encode(text), text
        assert own.encode(text, add_special_tokens=False) == other.encode(text, add_special_tokens=False), text
        for _ in range(8):
            part = ids[generator.randint(0, len(ids)) : generator.randint(0, len(ids)) or None]
            assert own.decode(part) == other.decode(part), (text, part)
        assert own.decode(ids) == other.decode(ids)
    scattered = generator.choices(range(own.vocab_size), k=2000)
    for start in range(0, 2000, 5):
        assert own.decode(scattered[start : start + 5]) == other.decode(scattered[start : start + 5])
    for token_id in (*own.hidden_tokens, *scattered):
        assert own.text_bytes(token_id) == other.text_bytes(token_id)
    for chat in (*CHATS, *((ChatMessage("user", f"a {text} b{text}"),) for text in own.hidden_tokens.values())):
        assert own.render_chat(chat) == other.render_chat(chat)


@pytest.mark.parametrize("kind", ["default", "smollm", "llama-bpe", "qwen2", "tekken", "gpt-4o"])
def test_ids_and_bytes_are_those_of_the_tokenizers_library(tmp_path: Path, kind: str) -> None:
    file = gguf_files.write(tmp_path / "tiny.gguf", keys={"tokenizer.ggml.pre": kind})
    own, other = both(file)
    compare(own, other, TEXTS)
    assert all(list(other.encode(text)) == llama_cpp.tokens(file, text) for text in TEXTS)


@pytest.mark.parametrize(
    ("architecture", "flags"),
    [
        ("llama", {}),
        ("gemma3", {"add_space_prefix": False}),
        ("phi3", {"add_bos_token": False, "add_eos_token": True}),
    ],
)
def test_pieces_are_those_of_the_tokenizers_library(
    tmp_path: Path, architecture: str, flags: Mapping[str, bool]
) -> None:
    keys = SENTENCEPIECE | {f"tokenizer.ggml.{key}": each for key, each in flags.items()}
    embedding = {"token_embd.weight": values("e", (len(PIECES) + len(WHOLE), HIDDEN))}
    file = gguf_files.write(tmp_path / "tiny.gguf", architecture, keys, embedding)
    own, other = both(file)
    for text in ("the the", "  the", "", "<s>the</s> the<end>the", "a\nb  <own>the <own> 12", "ÿ日", "the\n\n x"):
        assert list(own.encode(text)) == list(other.encode(text)) == llama_cpp.tokens(file, text), text
        assert own.decode(own.encode(text)) == other.decode(other.encode(text)), text
    assert own.hidden_tokens == other.hidden_tokens
    assert other.decode(other.encode("the a\nthe")) == "the a\nthe"


def test_a_kind_of_which_only_llama_cpp_has_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = gguf_files.write(tmp_path / "tiny.gguf", keys={"tokenizer.ggml.pre": "seed-coder"})
    with pytest.raises(InvalidInput, match=r"tokenizer\.ggml\.pre = 'seed-coder': must be one of"):
        file_tokenizer(read_header(file))
    tokenizer = load_tokenizer(str(file))
    for text in TEXTS:
        assert list(tokenizer.encode(text)) == llama_cpp.tokens(file, text), text
        assert tokenizer.decode(tokenizer.encode(text)) == re.sub("<s>|</s>|<turn>", "", text)
    plain = load_tokenizer(str(gguf_files.write(tmp_path / "plain.gguf")))
    assert (tokenizer.fingerprint, tokenizer.eos_token_ids) == (plain.fingerprint, plain.eos_token_ids)
    with pytest.raises(Unsupported, match="a tokenizer that the tokenizers library does not load"):
        cutter(tokenizer)
    monkeypatch.setattr("paceline.llama_cpp.library.find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"tokenizer\.ggml\.pre = 'seed-coder': must be one of"):
        load_tokenizer(str(file))


def test_surrogates_and_zeros_are_text(tmp_path: Path) -> None:
    own, _ = both(gguf_files.write(tmp_path / "tiny.gguf"))
    assert own.decode(own.encode("a\0b\ud800")) == "a\0b?"


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b"])
def test_a_published_file_s_tokenizer_is_its_folder_s(name: str) -> None:
    file = kept_gguf(name)
    if not file.is_file():
        pytest.skip(f"paceline pull {name} --keep-gguf")
    own, _ = both(file)
    sources = [path.read_text() for path in sorted(Path(gguf_files.__file__).parent.glob("*.py"))]
    texts = [*TEXTS, *(line for source in sources for line in source.splitlines()[::29]), sources[0]]
    # llama.cpp takes Qwen's ordinary token `</s>` for a control token, and composes no characters as Qwen's own does.
    alike = [text for text in texts if "</s>" not in text and unicodedata.is_normalized("NFC", text)]
    compare(own, load_tokenizer(name), alike)
