"""What a vocabulary holds, and how two are told apart. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from paceline.protocol.errors import require


def vocabulary_fingerprint(vocabulary: Mapping[str, int] | Iterable[tuple[str, int]]) -> str:
    """SHA-256 over sorted (token, id) pairs, lengths included so that no two vocabularies run together."""
    pairs = vocabulary.items() if isinstance(vocabulary, Mapping) else vocabulary
    digest = hashlib.sha256()
    for token, token_id in sorted(pairs):
        raw = token.encode("utf-8", "surrogatepass")
        digest.update(b"%d:%d:" % (len(raw), token_id) + raw)
    return digest.hexdigest()


def without_padding(vocabulary: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """The (token, id) pairs but `[PADn]` at id n: conversion to GGUF makes one up for each id that has no token.

    Raises:
        InvalidInput: there are no others.
    """
    pairs = [(token, token_id) for token, token_id in vocabulary if token != f"[PAD{token_id}]"]
    require(bool(pairs), "vocabulary", "[PADn] alone", "at least one other token")
    return pairs
