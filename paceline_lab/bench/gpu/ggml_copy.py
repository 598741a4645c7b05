"""What a large copy on one of llama.cpp's devices takes."""

from __future__ import annotations

import ctypes as c
import time
from typing import Any

from paceline.engine.llama.loading import list_devices
from paceline.llama_cpp.capi import Interface
from paceline.protocol.errors import Unsupported

COPIES = 20
CPU = "CPU"
_COPY_BYTES, _CPU_COPY_BYTES = 1 << 30, 1 << 28
_CONTEXT_BYTES = 1 << 16
"""Room for two tensors without their data."""
_FLOAT32, _FLOAT32_BYTES = 0, 4
_POINTER, _SIZE = c.c_void_p, c.c_size_t


class _InitParams(c.Structure):
    """`ggml_init_params`."""

    _fields_ = (("mem_size", _SIZE), ("mem_buffer", _POINTER), ("no_alloc", c.c_bool))


_FUNCTIONS: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
    ("ggml_init", _POINTER, (_InitParams,)),
    ("ggml_free", None, (_POINTER,)),
    ("ggml_new_tensor_1d", _POINTER, (_POINTER, c.c_int, c.c_int64)),
    ("ggml_backend_dev_buffer_type", _POINTER, (_POINTER,)),
    ("ggml_backend_alloc_ctx_tensors_from_buft", _POINTER, (_POINTER, _POINTER)),
    ("ggml_backend_buffer_free", None, (_POINTER,)),
    ("ggml_backend_tensor_memset", None, (_POINTER, c.c_uint8, _SIZE, _SIZE)),
    ("ggml_backend_tensor_copy", None, (_POINTER, _POINTER)),
)


def copy_bandwidths(interface: Interface, names: tuple[str, ...]) -> dict[str, float]:
    """Return the bytes per second of a large copy within each device, read plus written; the best of `COPIES`.

    The host copies by one thread.

    Args:
        interface: the library's.
        names: of devices; none: all of them.

    Raises:
        Unsupported: a device hasn't room for two gibibytes.
    """
    for name, result, arguments in _FUNCTIONS:
        function = getattr(interface.functions, name)
        function.restype, function.argtypes = result, arguments
    return {
        name: _copy_bandwidth(interface.functions, name, device)
        for name, device, _ in list_devices(interface)
        if name in names or not names
    }


def _copy_bandwidth(functions: Any, name: str, device: int) -> float:  # as ctypes types them
    size = _CPU_COPY_BYTES if name == CPU else _COPY_BYTES
    context = functions.ggml_init(_InitParams(_CONTEXT_BYTES, None, True))
    source, target = (functions.ggml_new_tensor_1d(context, _FLOAT32, size // _FLOAT32_BYTES) for _ in range(2))
    place = functions.ggml_backend_dev_buffer_type(device)
    buffer = functions.ggml_backend_alloc_ctx_tensors_from_buft(context, place)
    try:
        if not buffer:
            raise Unsupported(f"device {name}: no room for a copy of {size} bytes; --bandwidth says its GB/s")
        functions.ggml_backend_tensor_memset(source, 1, 0, size)
        return 2 * size / min(_copy_s(functions, source, target) for _ in range(COPIES))
    finally:
        if buffer:
            functions.ggml_backend_buffer_free(buffer)
        functions.ggml_free(context)


def _copy_s(functions: Any, source: int, target: int) -> float:
    """Seconds of one copy, which has been done when the call returns."""
    start_s = time.perf_counter()
    functions.ggml_backend_tensor_copy(source, target)
    return time.perf_counter() - start_s
