"""What a vocabulary holds, and how two are told apart. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from paceline.protocol.errors import require
from paceline.protocol.handshake import Fingerprint


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


def fingerprint_of(vocabulary: Iterable[tuple[str, int]], logits_width: int | None = None) -> Fingerprint:
    """The part of a model's fingerprint that its (token, id) pairs decide. `logits_width`: ids that it can choose.

    Raises:
        InvalidInput: there are no tokens but padding.
    """
    pairs = without_padding(vocabulary)
    size = 1 + max(token_id for _, token_id in pairs)
    size = size if logits_width is None else min(size, logits_width)
    return Fingerprint(tokenizer=vocabulary_fingerprint(pairs), vocab_size=size)
