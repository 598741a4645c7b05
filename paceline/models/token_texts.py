"""The bytes that a vocabulary's ids stand for, and how its tokenizer cuts a text that continues another.

Byte-level and SentencePiece vocabularies write their tokens differently; in bytes they can be compared.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.models.byte_pieces import letter_bytes, numbered_byte
from paceline.models.tokenizer import TableTokenizer, Tokenizer, TransformersTokenizer
from paceline.protocol.errors import Unsupported

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SPACE = "\u2581"
"""A space in SentencePiece's vocabularies."""


@dataclass(frozen=True)
class TokenTexts:
    """A vocabulary's ids.

    Attributes:
        vocab_size: ids are [0, vocab_size).
        texts: the bytes that an id adds to a text, parts of a character too, whatever precedes it.
        special: names of ids that stand for no text.
        beginning: ids that the tokenizer puts in front of every text.
    """

    vocab_size: int
    texts: Mapping[int, bytes]
    special: Mapping[int, str]
    beginning: tuple[int, ...] = ()


class Piece(NamedTuple):
    """A token of a text, and the bytes [start, end) of the text that it covers, parts of a character as the whole."""

    token_id: int
    start: int
    end: int


Cutter = Callable[[str], Sequence[Piece]]
"""Cuts a text that continues another: no space is put in front, and names of special tokens are text."""


def token_texts(tokenizer: Tokenizer) -> TokenTexts:
    """The texts of a tokenizer's ids.

    Raises:
        Unsupported: its vocabulary is neither byte-level nor SentencePiece's.
    """
    if isinstance(tokenizer, TableTokenizer):
        special = tokenizer.hidden_tokens
        texts = {i: tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size) if i not in special}
        return TokenTexts(tokenizer.vocab_size, texts, special)
    inner = _library(tokenizer)
    text_of = _reader(inner)
    special, added_texts = tokenizer.hidden_tokens, {i: text.encode() for text, i in tokenizer.added_tokens.items()}
    ids = ((i, piece) for piece, i in inner.get_vocab().items() if i not in special and i < tokenizer.vocab_size)
    texts = {i: added_texts[i] if i in added_texts else text_of(piece) for i, piece in ids}
    return TokenTexts(tokenizer.vocab_size, texts, special, tokenizer.encode(""))


def cutter(tokenizer: Tokenizer) -> Cutter:
    """The cutter of a tokenizer.

    Raises:
        Unsupported: the tokenizer is not of the tokenizers library.
    """
    if isinstance(tokenizer, TableTokenizer):
        return _cut_letters(tokenizer)
    from tokenizers import Tokenizer as Library

    settings: dict[str, Any] = json.loads(_library(tokenizer).backend_tokenizer.to_str())
    plain = {key: _without_prefix(settings[key]) for key in ("normalizer", "pre_tokenizer")}
    library = Library.from_str(json.dumps(settings | plain | {"truncation": None, "padding": None}))
    library.encode_special_tokens = True

    def cut(text: str) -> list[Piece]:
        encoding = library.encode(text, add_special_tokens=False)
        bytes_before = _bytes_before(text)
        spans = zip(encoding.ids, encoding.offsets, strict=True)
        return [Piece(token, bytes_before[start], bytes_before[end]) for token, (start, end) in spans]

    return cut


def _library(tokenizer: Tokenizer) -> PreTrainedTokenizerBase:
    if isinstance(tokenizer, TransformersTokenizer) and hasattr(tokenizer.inner, "backend_tokenizer"):
        return tokenizer.inner
    raise Unsupported("drafting between vocabularies: a tokenizer that the tokenizers library does not load")


def _reader(inner: PreTrainedTokenizerBase) -> Callable[[str], bytes]:
    """The function from an entry of the vocabulary to bytes."""
    decoders = [*_parts(json.loads(inner.backend_tokenizer.to_str())["decoder"])]
    kinds = {each["type"] for each in decoders}
    if "ByteLevel" in kinds:
        return letter_bytes
    replaces_spaces = any(each["type"] == "Replace" and each["pattern"] == {"String": _SPACE} for each in decoders)
    if "Metaspace" in kinds or replaces_spaces:
        return _sentencepiece_bytes
    names = ", ".join(sorted(kinds)) or "none"
    raise Unsupported(f"drafting between vocabularies: neither byte-level nor SentencePiece (decoders: {names})")


def _sentencepiece_bytes(piece: str) -> bytes:
    byte = numbered_byte(piece)
    return piece.replace(_SPACE, " ").encode() if byte is None else byte


def _parts(step: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """The steps of a sequence; any other step is its own."""
    if step is None:
        return
    for name in ("decoders", "normalizers", "pretokenizers"):
        for each in step.get(name, ()):
            yield from _parts(each)
    if step["type"] != "Sequence":
        yield step


def _without_prefix(step: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normaliser or pre-tokenizer that puts nothing in front of a text."""
    steps = [{**each, **_NO_PREFIX.get(each["type"], {})} for each in _parts(step) if each["type"] != "Prepend"]
    if step is None or not steps:
        return None
    if step["type"] != "Sequence":
        return steps[0]
    name = "normalizers" if "normalizers" in step else "pretokenizers"
    return {"type": "Sequence", name: steps}


_NO_PREFIX: Mapping[str, Mapping[str, Any]] = {
    "ByteLevel": {"add_prefix_space": False},
    "Metaspace": {"prepend_scheme": "never"},
}


def _bytes_before(text: str) -> Sequence[int]:
    """UTF-8 bytes before each character, and before the end."""
    if text.isascii():
        return range(len(text) + 1)
    return [0, *itertools.accumulate(len(character.encode()) for character in text)]


def _cut_letters(tokenizer: TableTokenizer) -> Cutter:
    """A table's ids are one byte or one character each."""

    def cut(text: str) -> list[Piece]:
        ids, offsets = tokenizer.encode(text), _bytes_before(text)
        bounds = range(offsets[-1] + 1) if len(ids) == offsets[-1] else offsets
        return [Piece(token, *span) for token, span in zip(ids, itertools.pairwise(bounds), strict=True)]

    return cut
