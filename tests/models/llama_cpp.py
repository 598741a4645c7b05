"""llama.cpp's own logits and tokens of a GGUF file: the reference for what we read.

The library is xllamacpp's extension module, which exports llama.cpp's C interface. Structures are passed by value, so
their layout is that of one build; `_require_layout` refuses another.
"""

from __future__ import annotations

import ctypes as c
import functools
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

_FLOAT32 = 0
_NO_FLASH_ATTENTION = 0


def _fields(**kinds: str) -> list[tuple[str, Any]]:
    """Names of fields by their type, in the order of the structure."""
    types = {"p": c.c_void_p, "i": c.c_int32, "f": c.c_float, "b": c.c_bool, "s": c.c_size_t}
    return [(name, types[kind[0]]) for kind, names in kinds.items() for name in names.split()]


class ModelParams(c.Structure):
    _fields_ = _fields(
        p="devices overrides", i="gpu_layers split_mode load_mode lazy_mode main_gpu",
        p1="tensor_split progress progress_data kv_overrides",
        b="vocab_only check_tensors use_extra_bufts no_host no_alloc load_mtp",
    )  # fmt: skip


class ContextParams(c.Structure):
    _fields_ = _fields(
        i="n_ctx n_batch n_ubatch n_seq_max n_rs_seq n_outputs n_outputs_seq n_threads n_threads_batch ctx_type"
        " rope_scaling pooling attention flash_attention",
        f="rope_base rope_scale yarn_ext yarn_attn yarn_fast yarn_slow", i1="yarn_original", f1="defrag",
        p="cb_eval cb_eval_data", i2="type_k type_v", s="moe_cache", p1="abort abort_data",
        b="embeddings offload_kqv no_perf op_offload swa_full kv_unified", p2="samplers", s1="n_samplers", p3="other",
    )  # fmt: skip


class Batch(c.Structure):
    _fields_ = (
        ("n_tokens", c.c_int32),
        ("token", c.POINTER(c.c_int32)),
        ("embd", c.c_void_p),
        ("pos", c.POINTER(c.c_int32)),
        ("n_seq_id", c.POINTER(c.c_int32)),
        ("seq_id", c.POINTER(c.POINTER(c.c_int32))),
        ("logits", c.POINTER(c.c_int8)),
    )


_LOG = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)
_SILENT = _LOG(lambda level, text, data: None)


@functools.cache
def _library() -> c.CDLL:
    spec = importlib.util.find_spec("xllamacpp")
    assert spec is not None and spec.origin is not None
    library = c.CDLL(str(Path(spec.origin).with_name("xllamacpp.abi3.so")))
    library.llama_log_set(_SILENT, None)
    text, ids = c.c_char_p, c.POINTER(c.c_int32)
    for name, result, arguments in (
        ("llama_model_default_params", ModelParams, []),
        ("llama_context_default_params", ContextParams, []),
        ("llama_model_load_from_file", c.c_void_p, [text, ModelParams]),
        ("llama_init_from_model", c.c_void_p, [c.c_void_p, ContextParams]),
        ("llama_model_get_vocab", c.c_void_p, [c.c_void_p]),
        ("llama_vocab_n_tokens", c.c_int32, [c.c_void_p]),
        ("llama_tokenize", c.c_int32, [c.c_void_p, text, c.c_int32, ids, c.c_int32, c.c_bool, c.c_bool]),
        ("llama_batch_init", Batch, [c.c_int32, c.c_int32, c.c_int32]),
        ("llama_batch_free", None, [Batch]),
        ("llama_decode", c.c_int32, [c.c_void_p, Batch]),
        ("llama_get_logits_ith", c.POINTER(c.c_float), [c.c_void_p, c.c_int32]),
        ("llama_free", None, [c.c_void_p]),
        ("llama_model_free", None, [c.c_void_p]),
    ):  # fmt: skip
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    _require_layout(library.llama_context_default_params())
    return library


def _require_layout(params: ContextParams) -> None:
    found = (params.n_ctx, params.n_batch, params.n_ubatch, params.type_k, params.type_v, params.swa_full)
    assert found == (512, 2048, 512, 1, 1, True), f"another build of llama.cpp: {found}"
    assert params.offload_kqv and not (params.abort or params.samplers or params.other)


@contextmanager
def _model(file: Path) -> Iterator[tuple[c.CDLL, int]]:
    library = _library()
    params = library.llama_model_default_params()
    params.use_extra_bufts = False
    model = library.llama_model_load_from_file(str(file).encode(), params)
    assert model, f"llama.cpp does not load {file}"
    try:
        yield library, model
    finally:
        library.llama_model_free(model)


def logits(file: Path, ids: Sequence[int], context: int = 256) -> np.ndarray:
    """Logits [len(ids), V] of a text, in float32 throughout."""
    with _model(file) as (library, model):
        params = library.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = context
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = _FLOAT32
        params.flash_attention = _NO_FLASH_ATTENTION
        width = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
        running = library.llama_init_from_model(model, params)
        assert running, f"llama.cpp does not run {file}"
        batch = library.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for row, token in enumerate(ids):
            batch.token[row], batch.pos[row], batch.n_seq_id[row], batch.logits[row] = token, row, 1, 1
            batch.seq_id[row][0] = 0
        try:
            assert library.llama_decode(running, batch) == 0
            rows = [library.llama_get_logits_ith(running, row)[:width] for row in range(len(ids))]
        finally:
            library.llama_batch_free(batch)
            library.llama_free(running)
    return np.array(rows, np.float32)


def tokens(file: Path, text: str) -> list[int]:
    """Ids of a prompt, with those that the file puts around one."""
    with _model(file) as (library, model):
        room = (c.c_int32 * (len(text.encode()) + 8))()
        vocabulary = library.llama_model_get_vocab(model)
        count = library.llama_tokenize(vocabulary, text.encode(), len(text.encode()), room, len(room), True, True)
        assert count >= 0
        return list(room[:count])
