"""llama.cpp's own logits and tokens of a GGUF file: the reference for what we read."""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from pathlib import Path

from paceline.engine.interface import Logits
from paceline.engine.llama.steps import BatchRows, LlamaContext
from paceline.llama_cpp.capi import TYPES, Interface, open_interface
from paceline.llama_cpp.library import any_library
from paceline.protocol.errors import InvalidInput


def _load(file: Path) -> tuple[Interface, int]:
    interface = open_interface(any_library(None).file)
    params = type(interface.model_params).from_buffer_copy(interface.model_params)
    params.use_extra_bufts = False
    model: int | None = interface.functions.llama_model_load_from_file(str(file).encode(), params)
    if not model:
        raise InvalidInput.of("model", str(file), "one that llama.cpp loads")
    return interface, model


class PlainModel:
    """A file's model, in float32 throughout, that reads each text in one pass."""

    def __init__(self, file: Path, context: int = 256) -> None:
        interface, model = _load(file)
        params = type(interface.context_params).from_buffer_copy(interface.context_params)
        params.n_ctx = params.n_batch = params.n_ubatch = context
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = TYPES["f32"]
        params.flash_attn_type = 0
        width = interface.functions.llama_vocab_n_tokens(interface.functions.llama_model_get_vocab(model))
        self._context = LlamaContext(interface, model, params, width)

    def logits(self, ids: Sequence[int], *, last_only: bool = False) -> Logits:
        """Logits [len(ids), V] of a text, or [1, V] of its last token."""
        rows = BatchRows()
        for row, token in enumerate(ids):
            rows.add(token, row, (0,), has_logits=not last_only or row == len(ids) - 1)
        logits = self._context.decode(rows).copy()
        self._context.remove(0)
        return logits


def logits(file: Path, ids: Sequence[int]) -> Logits:
    """Logits [len(ids), V] of a text, in float32 throughout."""
    return PlainModel(file).logits(ids)


def tokens(file: Path, text: str) -> list[int]:
    """Ids of a prompt, with those that the file puts around one."""
    interface, model = _load(file)
    raw = text.encode()
    room = (c.c_int32 * (len(raw) + 8))()
    vocabulary = interface.functions.llama_model_get_vocab(model)
    count = interface.functions.llama_tokenize(vocabulary, raw, len(raw), room, len(room), True, True)
    interface.functions.llama_model_free(model)
    assert count >= 0
    return list(room[:count])
