"""llama.cpp's C interface: the structures of the builds that are known, and the functions that are called.

The parameters of a model and of a context are passed by value, and their fields change often: where a structure is
not the library's own, every later field is another one. So a library is asked for its defaults first, into more room
than any build needs, and is refused unless they are, field by field, those of one layout below. Both are those of a
build's `include/llama.h`: b11549, of xllamacpp 2026.10.11549, and 0c1e57098, of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import ctypes as c
import os
import platform
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from paceline.protocol.errors import InvalidInput, Unsupported
from paceline.runtime.process import SPIN_COUNT

DECODED, NO_ROOM = 0, 1
"""What `llama_decode` returns: done; no cells for the rows, and the memory is as it was before."""
TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "bf16": 30}
"""Types of keys and values, as ggml numbers them."""
MOST_SEQUENCES = 256
"""LLAMA_MAX_SEQ."""
_MOST_BYTES = 1024
"""Room for the defaults of any build's structure; the largest here takes 168."""
_UNTOUCHED = b"\xa5"
_SIZE_SHOWS = platform.machine() in ("x86_64", "AMD64")
_ERROR_LEVEL = 4
"""GGML_LOG_LEVEL_ERROR."""
_KEPT_ERRORS = 8
_KINDS: Mapping[str, Any] = {
    "p": c.c_void_p, "i": c.c_int32, "u": c.c_uint32, "f": c.c_float, "b": c.c_bool, "s": c.c_size_t,
}  # fmt: skip


def _fields(*groups: str) -> list[tuple[str, Any]]:
    """Fields from `KIND: NAME NAME …`, in the order of the structure."""
    pairs = (group.partition(":") for group in groups)
    return [(name, _KINDS[kind]) for kind, _, names in pairs for name in names.split()]


class ModelParams(c.Structure):
    """`llama_model_params`."""

    _fields_ = _fields(
        "p:devices tensor_buft_overrides",
        "i:n_gpu_layers split_mode load_mode lazy_mode main_gpu",
        "p:tensor_split progress_callback progress_callback_user_data kv_overrides",
        "b:vocab_only check_tensors use_extra_bufts no_host no_alloc load_mtp",
    )


def _context_fields(*further: str) -> list[tuple[str, Any]]:
    return _fields(
        "u:n_ctx n_batch n_ubatch n_seq_max n_rs_seq n_outputs_max n_outputs_max_per_seq",
        "i:n_threads n_threads_batch ctx_type rope_scaling_type pooling_type attention_type flash_attn_type",
        "f:rope_freq_base rope_freq_scale yarn_ext_factor yarn_attn_factor yarn_beta_fast yarn_beta_slow",
        "u:yarn_orig_ctx",
        "f:defrag_thold",
        "p:cb_eval cb_eval_user_data",
        "i:type_k type_v",
        *further,
        "p:abort_callback abort_callback_data",
        "b:embeddings offload_kqv no_perf op_offload swa_full kv_unified",
        "p:samplers",
        "s:n_samplers",
        "p:ctx_other",
    )


class ContextParams(c.Structure):
    """`llama_context_params` of b11549."""

    _fields_ = _context_fields("s:moe_cache_size")


class OlderContextParams(c.Structure):
    """`llama_context_params` of 0c1e57098."""

    _fields_ = _context_fields()


class Batch(c.Structure):
    """`llama_batch`."""

    _fields_ = (
        ("n_tokens", c.c_int32),
        ("token", c.POINTER(c.c_int32)),
        ("embd", c.c_void_p),
        ("pos", c.POINTER(c.c_int32)),
        ("n_seq_id", c.POINTER(c.c_int32)),
        ("seq_id", c.POINTER(c.POINTER(c.c_int32))),
        ("logits", c.POINTER(c.c_int8)),
    )


class _Returned(c.Structure):
    """Whatever a function returns by value, and room behind it."""

    _fields_ = (("bytes", c.c_uint8 * _MOST_BYTES),)


_MODEL_DEFAULTS = {"n_gpu_layers": -1, "split_mode": 1, "load_mode": -1, "lazy_mode": 1, "use_extra_bufts": True}
_CONTEXT_DEFAULTS = {
    "n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "n_outputs_max_per_seq": 1, "n_threads": 4,
    "n_threads_batch": 4, "rope_scaling_type": -1, "pooling_type": -1, "attention_type": -1, "flash_attn_type": -1,
    "yarn_ext_factor": -1.0, "yarn_attn_factor": -1.0, "yarn_beta_fast": -1.0, "yarn_beta_slow": -1.0,
    "defrag_thold": -1.0, "type_k": 1, "type_v": 1, "offload_kqv": True, "no_perf": True, "op_offload": True,
    "swa_full": True,
}  # fmt: skip
"""Fields that are not named are zero."""
_TEXT, _ID, _IDS, _POINTER = c.c_char_p, c.c_int32, c.POINTER(c.c_int32), c.c_void_p
_LOG = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)
_FUNCTIONS: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
    ("llama_backend_init", None, ()),
    ("llama_log_set", None, (_LOG, _POINTER)),
    ("llama_print_system_info", _TEXT, ()),
    ("llama_version", _TEXT, ()),
    ("llama_max_devices", c.c_size_t, ()),
    ("llama_model_load_from_file", _POINTER, (_TEXT, ModelParams)),
    ("llama_model_free", None, (_POINTER,)),
    ("llama_model_n_ctx_train", _ID, (_POINTER,)),
    ("llama_model_has_encoder", c.c_bool, (_POINTER,)),
    ("llama_model_is_recurrent", c.c_bool, (_POINTER,)),
    ("llama_model_is_hybrid", c.c_bool, (_POINTER,)),
    ("llama_model_n_swa", _ID, (_POINTER,)),
    ("llama_model_is_diffusion", c.c_bool, (_POINTER,)),
    ("llama_model_get_vocab", _POINTER, (_POINTER,)),
    ("llama_vocab_n_tokens", _ID, (_POINTER,)),
    ("llama_tokenize", _ID, (_POINTER, _TEXT, _ID, _IDS, _ID, c.c_bool, c.c_bool)),
    ("llama_token_to_piece", _ID, (_POINTER, _ID, _TEXT, _ID, _ID, c.c_bool)),
    ("llama_init_from_model", _POINTER, ()),
    ("llama_free", None, (_POINTER,)),
    ("llama_n_ctx", c.c_uint32, (_POINTER,)),
    ("llama_get_memory", _POINTER, (_POINTER,)),
    ("llama_memory_seq_rm", c.c_bool, (_POINTER, _ID, _ID, _ID)),
    ("llama_memory_seq_cp", None, (_POINTER, _ID, _ID, _ID, _ID)),
    ("llama_decode", _ID, (_POINTER, Batch)),
    ("llama_get_logits", c.POINTER(c.c_float), (_POINTER,)),
    ("ggml_backend_dev_count", c.c_size_t, ()),
    ("ggml_backend_dev_get", _POINTER, (c.c_size_t,)),
    ("ggml_backend_dev_name", _TEXT, (_POINTER,)),
    ("ggml_backend_dev_description", _TEXT, (_POINTER,)),
)
"""Beside the two that return defaults, which `_defaults` calls. A context's parameters depend on the build."""


@dataclass(frozen=True, eq=False)
class Interface:
    """A loaded library whose structures are known.

    Attributes:
        file: the library's.
        functions: the library; its functions have their types.
        model_params: a copy of the library's defaults for a model.
        context_params: the same for a context.
        errors: lines that the library has logged as errors, the last few; whoever asks for its next ones clears them.
    """

    file: Path
    functions: Any
    model_params: Any
    context_params: Any
    errors: deque[str]
    _log: Any

    @property
    def first_error(self) -> str:
        """The first of the lines, which has the cause."""
        return self.errors[0] if self.errors else "no reason was logged"


@cache
def open_interface(file: Path) -> Interface:
    """Load a library and check that its structures are those above.

    Raises:
        InvalidInput: the library can't be loaded.
        Unsupported: it is another build's, or none of llama.cpp; names the function or the field that differs.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        # Read as OpenMP loads. Other runtimes than GCC's know the policy alone, under which GCC's would not spin.
        os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": str(SPIN_COUNT)}
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # else a failed assertion starts a debugger
    try:
        library = c.CDLL(str(file))
    except OSError as error:
        raise InvalidInput.of("llama.library", str(file), f"a library that loads ({error})") from error
    model = _defaults(library, file, "llama_model_default_params", _MODEL_DEFAULTS, ModelParams)
    context_layouts = (ContextParams, OlderContextParams)
    context = _defaults(library, file, "llama_context_default_params", _CONTEXT_DEFAULTS, *context_layouts)
    for name, result, arguments in _FUNCTIONS:
        function = _function(library, file, name)
        function.restype, function.argtypes = result, arguments
    library.llama_init_from_model.argtypes = (_POINTER, type(context))
    errors: deque[str] = deque(maxlen=_KEPT_ERRORS)

    def note(level: int, text: bytes, _: object) -> None:
        if level == _ERROR_LEVEL:
            errors.append(text.decode(errors="replace").strip())

    log = _LOG(note)
    library.llama_log_set(log, None)
    library.llama_backend_init()
    _load_backends(library, file.parent)
    return Interface(file, library, model, context, errors, log)


def _load_backends(library: c.CDLL, folder: Path) -> None:
    """Load what computes, where a build keeps it in libraries beside the file, as llama.cpp's releases do."""
    if library.ggml_backend_dev_count() == 0 and hasattr(library, "ggml_backend_load_all_from_path"):
        library.ggml_backend_load_all_from_path(c.c_char_p(os.fsencode(folder)))


def _function(library: c.CDLL, file: Path, name: str) -> Any:  # as ctypes types them
    try:
        return getattr(library, name)
    except AttributeError:
        reason = f"{file} has no function {name}: it is not llama.cpp's, or of a build that is not known here"
        raise Unsupported.of("llama.library", reason) from None


def _defaults(
    library: c.CDLL, file: Path, name: str, expected: Mapping[str, object], *layouts: type[c.Structure]
) -> c.Structure:
    """The defaults that a library returns, in the layout that they have."""
    raw = _returned_bytes(_function(library, file, name))
    differences = [_difference(layout, raw, expected) for layout in layouts]
    if None not in differences:
        reason = f"{file} is of a build that is not known here: {name} has {differences[0]}"
        raise Unsupported.of("llama.library", reason)
    return layouts[differences.index(None)].from_buffer_copy(raw)


def _returned_bytes(function: Any) -> bytes:
    """What a function returns by value; where its caller says where to, what lies behind it is `_UNTOUCHED`.

    x86-64 passes that place as a first argument, so that a structure's size shows.
    """
    if not _SIZE_SHOWS:
        function.restype, function.argtypes = _Returned, ()
        return bytes(function())
    place = c.create_string_buffer(_UNTOUCHED * _MOST_BYTES, _MOST_BYTES)
    function.restype, function.argtypes = c.c_void_p, (c.c_void_p,)
    function(c.addressof(place))
    return place.raw


def _difference(layout: type[c.Structure], raw: bytes, expected: Mapping[str, object]) -> str | None:
    """The first field whose value is not the default; None: there is no such field."""
    values = layout.from_buffer_copy(raw)
    for field in layout._fields_:
        value, default = getattr(values, field[0]) or 0, expected.get(field[0], 0)
        if value != default:
            return f"{field[0]} = {value}, not {default}"
    size = c.sizeof(layout)
    is_longer = _SIZE_SHOWS and raw[size:].strip(_UNTOUCHED) != b""
    return f"values behind its {size} bytes" if is_longer else None
