"""Compiling hot loops with numba, their machine code kept on disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba import types

_Function = TypeVar("_Function", bound=Callable[..., object])
_config: Any = numba.config
_PACKAGE = Path(__file__).parents[1]


def compiled(function: _Function, fastmath: Any = False, *, inline: bool = False) -> _Function:
    """Compile, with the machine code kept on disk where a folder for it is writable.

    Args:
        fastmath: what the compiler may assume or reorder, as numba's option of that name.
        inline: whether every caller has it inlined, so that what is constant there is constant here.
    """
    options: dict[str, Any] = {
        "nogil": True,
        "fastmath": fastmath,
        "forceinline": inline,
        # Division by zero gives infinity; a check for it would keep loops from becoming vector instructions.
        "error_model": "numpy",
    }
    with _machine_code() as is_kept:
        dispatcher: _Function = numba.njit(function, cache=is_kept, **options)
    return dispatcher


def compiled_pointer(function: Callable[..., None], words: int) -> int:
    """Compile a function of so many int64 and return its address.

    A caller by address doesn't contain the function's code, so a large function is compiled once for all callers.
    """
    options: dict[str, Any] = {"nopython": True, "error_model": "numpy"}
    signature = types.void(*[types.int64] * words)
    with _machine_code() as is_kept:
        callback: Any = numba.cfunc(signature, cache=is_kept, **options)(function)
    return int(callback.address)


@cache
def _folder() -> str | None:
    """The folder for the machine code of these very sources; None: no place is writable.

    Numba looks only at the file of a function for changes, and a function here holds constants and code of
    other files: what was compiled against an older one would write where it must not.
    """
    numba_folder: str = _config.CACHE_DIR
    beside = _PACKAGE if os.access(_PACKAGE, os.W_OK) else Path("~/.cache/paceline").expanduser()
    folder = Path(numba_folder or beside / "__pycache__") / f"compiled-{_digest()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return str(folder)


def _digest() -> str:
    digest = hashlib.sha256(numba.__version__.encode())
    for file in sorted(_PACKAGE.rglob("*.py")):
        source = file.read_bytes()
        if b"paceline.runtime.compiled import" in source:
            digest.update(str(file).encode() + source)
    return digest.hexdigest()[:16]


@contextmanager
def _machine_code() -> Iterator[bool]:
    """Keep the machine code of what is compiled within the block in `_folder`; yields whether there is one."""
    before, folder = _config.CACHE_DIR, _folder()
    _config.CACHE_DIR = folder or before
    try:
        yield folder is not None
    finally:
        _config.CACHE_DIR = before
