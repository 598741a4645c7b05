"""Bytes of vocabulary entries that are no whole character."""

from __future__ import annotations

import re
from functools import cache

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""How SentencePiece's vocabularies name a byte."""


def piece_bytes(piece: str) -> bytes:
    """What an entry stands for: a byte by its number, letters that stand for bytes, or its own text."""
    if (found := _BYTE.fullmatch(piece)) is not None:
        return bytes((int(found[1], 16),))
    by_letter = _by_letter()
    if all(letter in by_letter for letter in piece):
        return bytes(by_letter[letter] for letter in piece)
    return piece.encode()


@cache
def _by_letter() -> dict[str, int]:
    """The bytes that byte-level vocabularies write as letters, all of them visible."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}
