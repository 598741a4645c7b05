"""The tokenizer of a GGUF file by llama.cpp itself, for vocabularies of kinds that nothing else here reads."""

from __future__ import annotations

import ctypes as c
import os
import weakref
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizer, PreTrainedTokenizerBase

from paceline.llama_cpp.capi import open_interface
from paceline.llama_cpp.library import any_library
from paceline.models.gguf_header import GgufHeader
from paceline.models.gguf_tokenizer import (
    KIND_KEYS,
    chat_template,
    distinct_vocabulary,
    file_tokenizer,
    special_tokens,
    token_numbers,
)
from paceline.protocol.errors import InvalidInput, PacelineError

_SPECIAL, _OWN = (2, 3), 4
"""Types of tokens in a file: unknown or control; added by the file's author."""
_PIECE_BYTES = 64
"""Room for most tokens' bytes."""


def readable_tokenizer(header: GgufHeader) -> PreTrainedTokenizerBase:
    """The tokenizer of a file: one of the tokenizers library, or llama.cpp's for a kind that we have no table for.

    Raises:
        InvalidInput: as `file_tokenizer`, where llama.cpp isn't installed or doesn't know the kind either.
    """
    try:
        return file_tokenizer(header)
    except InvalidInput as error:
        if error.metadata.get("field") not in KIND_KEYS:
            raise
        try:
            return GgufTokenizer(header)
        except PacelineError:
            raise error from None


class GgufTokenizer(PreTrainedTokenizer):
    """Texts and ids by llama.cpp; chat templates by transformers."""

    def __init__(self, header: GgufHeader) -> None:
        """Load a file's vocabulary, without its tensors.

        Raises:
            InvalidInput: llama.cpp loads none; with its reason. Or there is no library.
        """
        interface = open_interface(any_library(None).file)
        params = type(interface.model_params).from_buffer_copy(interface.model_params)
        params.vocab_only, params.n_gpu_layers = True, 0
        interface.errors.clear()
        self._functions = interface.functions
        model: int | None = self._functions.llama_model_load_from_file(os.fsencode(header.file), params)
        if not model:
            limit = f"a file whose vocabulary llama.cpp loads ({interface.first_error})"
            raise InvalidInput.of("model", header.file.stem, limit)
        weakref.finalize(self, self._functions.llama_model_free, model)
        self._vocabulary: int = self._functions.llama_model_get_vocab(model)
        self._tokens = distinct_vocabulary(header)
        self._ids = {token: token_id for token_id, token in enumerate(self._tokens)}
        self._pieces = [self._piece(token_id) for token_id in range(len(self._tokens))]
        self._puts_space = b"".join(self._pieces[i] for i in self._read("a")).startswith(b" ")
        super().__init__(chat_template=chat_template(header), **special_tokens(header))  # type: ignore[no-untyped-call]
        self.add_tokens(_added_tokens(header, self._tokens))

    @property
    def vocab_size(self) -> int:  # noqa: D102
        return len(self._tokens)

    def get_vocab(self) -> dict[str, int]:  # noqa: D102
        return dict(self._ids)

    def encode(self, text: Any, *_: Any, add_special_tokens: bool = True, **settings: Any) -> list[int]:  # noqa: D102
        parses = not settings.get("split_special_tokens", False)
        return self._read(text, adds_special=add_special_tokens, parses_special=parses)

    def _read(self, text: str, *, adds_special: bool = False, parses_special: bool = False) -> list[int]:
        raw = text.encode(errors="replace")
        count = len(raw) + 2
        while True:
            room = (c.c_int32 * count)()
            count = self._functions.llama_tokenize(
                self._vocabulary, raw, len(raw), room, len(room), adds_special, parses_special
            )
            if count >= 0:
                return room[:count]
            count = -count  # the room that it takes

    def _piece(self, token_id: int) -> bytes:
        """A token's bytes; of a special one its name."""
        size = _PIECE_BYTES
        while True:
            room = c.create_string_buffer(size)
            size = self._functions.llama_token_to_piece(self._vocabulary, token_id, room, len(room), 0, True)
            if size >= 0:
                return room.raw[:size]
            size = -size

    def _decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False, *_: Any, **__: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        skips = self._special_ids() if skip_special_tokens else frozenset()
        raw = b"".join(self._pieces[token_id] for token_id in ids if token_id not in skips)
        # As SentencePiece: the space that reading puts in front is none of the text.
        return (raw.removeprefix(b" ") if self._puts_space else raw).decode(errors="replace")

    def _special_ids(self) -> frozenset[int]:
        return frozenset(i for i, token in self._added_tokens_decoder.items() if token.special)

    def _convert_token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self._tokens[index]


def _added_tokens(header: GgufHeader, tokens: Sequence[str]) -> list[AddedToken]:
    """The tokens that stand apart by the file's own word: llama.cpp takes others by their names, too (`</s>`)."""
    value = header.metadata.get("tokenizer.ggml.token_type")
    types = [] if value is None else token_numbers("token_type", value, len(tokens))
    return [
        AddedToken(token, special=kind in _SPECIAL, normalized=False)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (*_SPECIAL, _OWN)
    ]
