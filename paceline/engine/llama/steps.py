"""One context of llama.cpp: its cache of cells, and passes over batches of rows."""

from __future__ import annotations

import ctypes as c
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.engine.interface import Logits
from paceline.engine.ledger import RETRY_AFTER_MS
from paceline.llama_cpp.capi import DECODED, NO_ROOM, Batch, Interface
from paceline.protocol.errors import InternalError, Overloaded


@dataclass
class BatchRows:
    """Rows of one pass, those of a sequence in the order of their positions.

    `sequences` are those that see a row, `has_logits` says whether its logits are computed.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    sequences: list[Sequence[int]] = field(default_factory=list)
    has_logits: list[bool] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, token: int, position: int, sequences: Sequence[int], *, has_logits: bool) -> None:
        """Add one row behind the others."""
        self.tokens.append(token)
        self.positions.append(position)
        self.sequences.append(sequences)
        self.has_logits.append(has_logits)


class LlamaContext:
    """A context; it frees itself, and the model that was loaded for it, once nobody has it."""

    def __init__(self, interface: Interface, model: int, params: Any, vocab_size: int) -> None:
        """Make a context of a loaded model, whose pointer becomes this object's.

        Args:
            interface: the library's.
            model: a `llama_model *`.
            params: `llama_context_params`.
            vocab_size: ids that have logits; what is wider is padding.

        Raises:
            InternalError: llama.cpp makes none; with its reason.
        """
        self._functions = interface.functions
        self._width: int = self._functions.llama_vocab_n_tokens(self._functions.llama_model_get_vocab(model))
        self._vocab_size = vocab_size
        interface.errors.clear()
        pointer = self._functions.llama_init_from_model(model, params)
        if not pointer:
            self._functions.llama_model_free(model)
            raise InternalError(f"llama.cpp makes no context: {interface.first_error}")
        self._pointer: int = pointer
        self._memory = self._functions.llama_get_memory(pointer)
        weakref.finalize(self, _free, self._functions, pointer, model)

    @property
    def cells(self) -> int:
        """Cells of the whole cache."""
        return int(self._functions.llama_n_ctx(self._pointer))

    def remove(self, sequence: int, start: int = 0) -> None:
        """As `SequenceMemory`."""
        if not self._functions.llama_memory_seq_rm(self._memory, sequence, start, -1):
            raise InternalError(f"llama.cpp does not remove the cells of sequence {sequence} from {start} on")

    def remove_between(self, sequence: int, start: int, end: int) -> None:
        """Remove a sequence from its cells in [start, end)."""
        self._functions.llama_memory_seq_rm(self._memory, sequence, start, end)

    def copy(self, source: int, sequence: int, start: int, end: int) -> None:
        """As `SequenceMemory`."""
        self._functions.llama_memory_seq_cp(self._memory, source, sequence, start, end)

    def decode(self, rows: BatchRows) -> Logits:
        """Compute rows.

        Returns:
            Logits of the rows that have them, in their order: [rows, V] float32, a view, valid until the next call.

        Raises:
            Overloaded: there are no cells for the rows; the cache is as it was.
            InternalError: llama.cpp fails, and part of the rows may be in the cache.
        """
        arrays = _arrays(rows)
        code = self._functions.llama_decode(self._pointer, _batch(*arrays))
        if code == NO_ROOM:
            message = f"llama.cpp has no cells for {len(rows)} rows, of {self.cells}"
            raise Overloaded(message, retry_after_ms=RETRY_AFTER_MS)
        if code != DECODED:
            raise InternalError(f"llama.cpp computes no step of {len(rows)} rows: llama_decode returns {code}")
        count = sum(rows.has_logits)
        if not count:
            return np.empty((0, self._vocab_size), np.float32)
        logits = np.ctypeslib.as_array(self._functions.llama_get_logits(self._pointer), (count, self._width))
        return logits[:, : self._vocab_size]


def _free(functions: Any, context: int, model: int) -> None:
    functions.llama_free(context)
    functions.llama_model_free(model)


_Ints = NDArray[np.int32]


def _arrays(rows: BatchRows) -> tuple[_Ints, _Ints, _Ints, NDArray[np.uint64], NDArray[np.int8], _Ints]:
    """Tokens, positions, counts of sequences, addresses of their ids, flags, and the ids themselves."""
    counts = np.array([len(each) for each in rows.sequences], np.int32)
    ids = np.array([sequence for each in rows.sequences for sequence in each], np.int32)
    starts = np.cumsum(counts, dtype=np.uint64) - counts.astype(np.uint64)
    addresses = ids.ctypes.data + starts * np.uint64(ids.itemsize)
    flags = np.array(rows.has_logits, np.int8)
    return np.array(rows.tokens, np.int32), np.array(rows.positions, np.int32), counts, addresses, flags, ids


def _batch(
    tokens: _Ints, positions: _Ints, counts: _Ints, addresses: NDArray[np.uint64], flags: NDArray[np.int8], _: _Ints
) -> Batch:
    """The structure that points to arrays, which must outlive it."""
    batch = Batch(n_tokens=len(tokens))
    batch.token, batch.pos, batch.n_seq_id = (_pointer(each, c.c_int32) for each in (tokens, positions, counts))
    batch.logits = _pointer(flags, c.c_int8)
    batch.seq_id = _pointer(addresses, c.POINTER(c.c_int32))
    return batch


def _pointer(array: NDArray[Any], kind: Any) -> Any:  # as ctypes types them
    return array.ctypes.data_as(c.POINTER(kind))
