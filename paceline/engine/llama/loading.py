"""From a GGUF file to an engine of llama.cpp that is known to be exact."""

from __future__ import annotations

import ctypes as c
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.engine.interface import EngineInfo
from paceline.engine.llama.checks import check_engine
from paceline.engine.llama.engine import LlamaEngine, PassShape
from paceline.engine.llama.steps import LlamaContext
from paceline.llama_cpp.capi import MOST_SEQUENCES, TYPES, Interface, open_interface
from paceline.llama_cpp.library import LlamaLibrary, any_library, chosen_library
from paceline.models.gguf_config import vocabulary
from paceline.models.gguf_header import GgufHeader, read_header
from paceline.models.pull import file_digest
from paceline.models.resolve import ModelSource
from paceline.models.vocabulary import fingerprint_of
from paceline.protocol.errors import InvalidInput, PacelineError, Unsupported, require
from paceline.runtime.config import FAST_DTYPE, NOT_QUANTIZED, EngineSettings
from paceline.runtime.llama_settings import FLASH_ATTENTION, SPLIT_MODES, LlamaSettings
from paceline.runtime.process import own_cores

logger = logging.getLogger(__name__)

LLAMA, TORCH = "llama", "torch"
DEFAULT_KV_BYTES = 2 << 30
"""KV budget where none is set, as a CPU's with torch."""
_PASS_ROWS = 512
"""Most rows of a pass: llama.cpp's own default."""
_CELLS = 256
"""llama.cpp rounds its caches up to so many cells, and needs one for each of its sequences."""
_FLOAT_TYPES = frozenset((0, 1, 30))
_SAMPLED_BYTES = 64
"""Bytes of each tensor that the digest covers, evenly spaced."""
_TEXT = (
    b"The keeper climbed the stairs of the lighthouse, lit the lamp, and wrote the hour in the book. Then the sea "
    b"was quiet, and 12 boats went home by the light of the moon, one behind the other, as they did every year."
)
"""What the checks read: text, since random tokens give logits that are near each other."""


def picks_llama(source: ModelSource, settings: EngineSettings) -> bool:
    """Whether llama.cpp computes a model: where the settings say so, or say nothing and its library is there.

    Raises:
        InvalidInput: `engine = llama` for what is no whole GGUF file, or with settings that are torch's.
    """
    if settings.engine == TORCH:
        return False
    refusal = _refusal(source, settings)
    if settings.engine == LLAMA:
        if refusal is not None:
            raise refusal
        return True
    return refusal is None and chosen_library(settings.llama.library) is not None


def _refusal(source: ModelSource, settings: EngineSettings) -> InvalidInput | None:
    """The first reason why llama.cpp can't compute a model; None: there is none."""
    own_format = "the file's own number format stands"
    checks = (
        (source.gguf is not None, "model", source.name, "a .gguf file, with engine = llama"),
        (source.layers is None, "model", source.name, "whole, with engine = llama"),
        (settings.quantization == NOT_QUANTIZED, "quantization", settings.quantization, f"none: {own_format}"),
        (settings.dtype in ("auto", FAST_DTYPE), "dtype", settings.dtype, f"auto: {own_format}"),
        (settings.device in ("auto", "cpu"), "device", settings.device, "auto or cpu; llama.devices names others"),
    )
    return next((InvalidInput.of(field, value, limit) for holds, field, value, limit in checks if not holds), None)


def load_llama_engine(source: ModelSource, settings: EngineSettings) -> LlamaEngine:
    """Load a GGUF file with llama.cpp; `paceline.engine.loading.load_engine` says what it raises."""
    assert source.gguf is not None
    library = any_library(settings.llama.library)
    interface = open_interface(library.file)
    header = read_header(source.gguf)
    max_length = _max_length(header, settings)
    shape, cells = _plan_cache(header, settings, max_length)
    if settings.engine != LLAMA:
        logger.info("model %s: computed by llama.cpp (%s); engine = torch for ours", source.name, library.origin)
    model = _load_model(interface, source.gguf, settings)
    _refuse_kinds(interface, model, max_length)
    fingerprint = fingerprint_of((token, token_id) for token_id, token in enumerate(vocabulary(header)))
    vocab_size = fingerprint.vocab_size
    ids = _check_text(interface, model, vocab_size)
    context = LlamaContext(interface, model, _context_params(interface, settings, shape, cells), vocab_size)
    info = EngineInfo(replace(fingerprint, model=source.name), max_length, cells)
    engine = LlamaEngine(context, info, settings, shape)
    facts = _numeric_facts(interface, library, header, settings) | {"max_length": max_length}
    is_rounded = any(tensor.type_id not in _FLOAT_TYPES for tensor in header.tensors.values())
    engine.invariance = check_engine(engine, ids, _check_facts(facts, header, engine), is_rounded=is_rounded)
    facts |= {"shape": repr(engine.shape), "rows": engine.invariance}
    numeric = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    engine.info = replace(info, fingerprint=replace(info.fingerprint, numeric=numeric))
    return engine


def _max_length(header: GgufHeader, settings: EngineSettings) -> int:
    context = _integer(header, "context_length", 0)
    length = settings.max_model_len or context
    require(context > 0, f"{header.architecture}.context_length", context, "in the file: the context's length")
    require(length <= context, "max_model_len", length, f"at most {context}, the model's context")
    return length


def _integer(header: GgufHeader, key: str, default: int) -> int:
    """A number of the file's architecture; of one for each layer, the largest."""
    value = header.metadata.get(f"{header.architecture}.{key}", default)
    return int(np.max(value)) if isinstance(value, int | np.ndarray) else default


def row_bytes(header: GgufHeader, settings: LlamaSettings) -> int:
    """Bytes of one row's keys and values in all layers, at most."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    heads = max(1, _integer(header, "attention.head_count", 1))  # models without attention say 0
    size = _integer(header, "embedding_length", 0) // heads
    kv_heads = _integer(header, "attention.head_count_kv", heads)
    total = 0
    for kind, key in ((settings.cache_type_k, "key_length"), (settings.cache_type_v, "value_length")):
        values, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(TYPES[kind])]
        total += kv_heads * _integer(header, f"attention.{key}", size) * block_bytes // values
    return total * _integer(header, "block_count", 1)


def _kv_rows(header: GgufHeader, settings: EngineSettings, max_length: int) -> int:
    """Rows of the KV budget; more than all sessions can have are not reserved where none is set."""
    rows = (settings.kv_bytes or DEFAULT_KV_BYTES) // max(1, row_bytes(header, settings.llama))
    return rows if settings.kv_bytes else min(rows, settings.max_num_seqs * (max_length + _CELLS))


def _plan_cache(header: GgufHeader, settings: EngineSettings, max_length: int) -> tuple[PassShape, int]:
    """The shape of passes, and the cache's cells.

    Raises:
        InvalidInput: in reproducible mode, if the budget has no room for one session.
    """
    rows = _kv_rows(header, settings, max_length)
    if not settings.reproducible:
        step_rows = settings.max_step_rows + settings.prefill_chunk
        return PassShape(min(_PASS_ROWS, step_rows, _round_up(rows)), MOST_SEQUENCES), rows
    stream = _round_up(max_length + settings.reproducible_rows)
    limit = f"at least {stream}: one session of max_model_len tokens, if reproducible"
    require(rows >= stream, "KV rows of kv_bytes", rows, limit)
    sequences = min(rows // stream, settings.max_num_seqs, MOST_SEQUENCES)
    return PassShape(settings.reproducible_rows, sequences, alone=True), sequences * stream


def _round_up(rows: int) -> int:
    return -(-rows // _CELLS) * _CELLS


def _load_model(interface: Interface, file: Path, settings: EngineSettings) -> int:
    params, llama = type(interface.model_params).from_buffer_copy(interface.model_params), settings.llama
    devices = _devices(interface, settings)
    params.devices = None if devices is None else c.addressof(devices)
    params.n_gpu_layers = 0 if settings.device == "cpu" else llama.gpu_layers
    params.split_mode, params.main_gpu = SPLIT_MODES.index(llama.split_mode), llama.main_gpu
    shares = _shares(llama.tensor_split, interface.functions.llama_max_devices())
    params.tensor_split = None if llama.tensor_split is None else c.addressof(shares)
    interface.errors.clear()
    model: int | None = interface.functions.llama_model_load_from_file(os.fsencode(file), params)
    if not model:
        raise InvalidInput.of("model", file.stem, f"a model that llama.cpp loads ({interface.first_error})")
    return model


def _shares(text: str | None, most: int) -> Any:  # an array of floats
    """The shares of `llama.tensor_split`, zeros behind them.

    Raises:
        InvalidInput: no numbers, or more than there can be devices.
    """
    try:
        shares = [] if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        shares = [-1.0]
    fits = len(shares) <= most and all(share >= 0 for share in shares)
    require(fits, "llama.tensor_split", text, f"at most {most} numbers, such as 3,1")
    return (c.c_float * most)(*shares)


def _devices(interface: Interface, settings: EngineSettings) -> Any:  # an array of pointers that ends with null
    """The devices that a model is loaded on beside the CPU; None: llama.cpp takes all."""
    names = () if settings.device == "cpu" else settings.llama.devices or None
    if names is None:
        return None
    pointers = {name: pointer for name, pointer, _ in list_devices(interface)}
    for name in names:
        require(name in pointers, "llama.devices", name, f"of: {', '.join(pointers)}")
    return (c.c_void_p * (len(names) + 1))(*map(pointers.get, names), None)


def list_devices(interface: Interface) -> list[tuple[str, int, str]]:
    """Name, pointer and description of each device that a library computes on."""
    functions = interface.functions
    name, description = functions.ggml_backend_dev_name, functions.ggml_backend_dev_description
    pointers = map(functions.ggml_backend_dev_get, range(functions.ggml_backend_dev_count()))
    return [(name(each).decode(), each, description(each).decode()) for each in pointers]


def _refuse_kinds(interface: Interface, model: int, max_length: int) -> None:
    """Refuse, and free, a model whose cache can't be rolled back to any row.

    Raises:
        Unsupported: naming what it is.
    """
    functions = interface.functions
    window = functions.llama_model_n_swa(model)
    kinds = {
        "an encoder": functions.llama_model_has_encoder(model),
        "a recurrent state": functions.llama_model_is_recurrent(model) or functions.llama_model_is_hybrid(model),
        "diffusion": functions.llama_model_is_diffusion(model),
        # llama.cpp gives cells to others that have left the window, and a rollback brings them back into it.
        f"a window of {window} tokens; set max_model_len to at most that": 0 < window < max_length,
    }
    kind = next((kind for kind, applies in kinds.items() if applies), None)
    if kind is not None:
        functions.llama_model_free(model)
        raise Unsupported(f"engine = llama: a model with {kind}")


def _check_text(interface: Interface, model: int, vocab_size: int) -> list[int]:
    """Ids of the checks' text; of a vocabulary that has none for it, ids in turn."""
    functions, room = interface.functions, (c.c_int32 * len(_TEXT))()
    vocab = functions.llama_model_get_vocab(model)
    count = functions.llama_tokenize(vocab, _TEXT, len(_TEXT), room, len(room), False, False)
    ids = [each for each in room[: max(0, count)] if 0 <= each < vocab_size]
    return ids or [each % vocab_size for each in range(97)]


def _context_params(interface: Interface, settings: EngineSettings, shape: PassShape, cells: int) -> Any:
    llama = settings.llama
    params = type(interface.context_params).from_buffer_copy(interface.context_params)
    params.n_ctx = _round_up(cells)
    # It wants room for the logits of one row of every sequence.
    params.n_batch = params.n_ubatch = max(shape.rows, shape.sequences)
    params.n_seq_max = shape.sequences
    params.n_threads = params.n_threads_batch = settings.threads or own_cores()
    params.type_k, params.type_v = TYPES[llama.cache_type_k], TYPES[llama.cache_type_v]
    params.flash_attn_type = FLASH_ATTENTION[llama.flash_attn]
    params.offload_kqv = settings.device != "cpu"
    params.kv_unified = not shape.alone
    return params


def _check_facts(facts: Mapping[str, Any], header: GgufHeader, engine: LlamaEngine) -> dict[str, Any] | None:
    """All that the outcome of an engine's checks depends on; None: a GPU's driver does, too, and isn't seen here."""
    if facts["device"] != "cpu" and not all(name.startswith("CPU ") for name in facts["devices"]):
        return None
    status = header.file.stat()
    return {
        **facts,
        "file": [status.st_size, status.st_mtime_ns],
        "shape": repr(engine.shape),
        "kv_rows": engine.info.max_kv_rows,
    }


def _numeric_facts(
    interface: Interface, library: LlamaLibrary, header: GgufHeader, settings: EngineSettings
) -> dict[str, Any]:
    return {
        "engine": "llama.cpp",
        "library": _library_digest(library.file),
        "system": interface.functions.llama_print_system_info().decode(),
        "devices": [f"{name} {description}" for name, _, description in list_devices(interface)],
        "weights": _weights_digest(header),
        "threads": settings.threads or own_cores(),
        "device": settings.device,
        "settings": settings.llama.model_dump(mode="json", exclude={"library"}),
    }


def _library_digest(file: Path) -> list[str]:
    """Digests of the library and of ggml's beside it, which compute."""
    return [file_digest(each) for each in sorted({file, *file.parent.glob("*ggml*")}) if each.is_file()]


def _weights_digest(header: GgufHeader) -> str:
    """Digest of the metadata, and of every tensor's name, shape, type and some evenly spaced bytes."""
    digest = hashlib.sha256(repr(sorted((key, str(value)) for key, value in header.metadata.items())).encode())
    for name, tensor in sorted(header.tensors.items()):
        flat = tensor.data.reshape(-1)
        sampled = flat[np.linspace(0, len(flat) - 1, _SAMPLED_BYTES, dtype=np.int64)]
        digest.update(f"{name} {tensor.shape} {tensor.type_id}".encode() + sampled.tobytes())
    return digest.hexdigest()


def at_hand(settings: LlamaSettings) -> str:
    """The library that would compute, in a sentence: its origin, build and devices; or why there is none."""
    try:
        library = any_library(settings.library)
        interface = open_interface(library.file)
    except PacelineError as error:
        return error.message
    devices = ", ".join(f"{name} ({description})" for name, _, description in list_devices(interface))
    return f"{library.origin}, version {interface.functions.llama_version().decode()}; devices: {devices}"
