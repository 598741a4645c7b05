"""Bytes of vocabulary entries that are no whole character."""

from __future__ import annotations

import re
from functools import cache

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""The name of a byte in SentencePiece's vocabularies."""


def piece_bytes(piece: str) -> bytes:
    """The bytes of an entry: a byte by its number, letters that stand for bytes, or its own text."""
    byte = numbered_byte(piece)
    return letter_bytes(piece) if byte is None else byte


def numbered_byte(piece: str) -> bytes | None:
    """The byte that an entry names by its number; None: it names none."""
    match = _BYTE.fullmatch(piece)
    return None if match is None else bytes((int(match[1], 16),))


def letter_bytes(piece: str) -> bytes:
    """The bytes for which an entry's letters stand, or its own text if one stands for none."""
    by_letter = _by_letter()
    if all(letter in by_letter for letter in piece):
        return bytes(by_letter[letter] for letter in piece)
    return piece.encode()


@cache
def _by_letter() -> dict[str, int]:
    """The bytes that byte-level vocabularies write as letters, all of them visible."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}
