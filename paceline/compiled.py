"""Compiling hot loops with numba, their machine code kept on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

_Function = TypeVar("_Function", bound=Callable[..., object])


def compiled(function: _Function, fastmath: Any = False, *, inlined: bool = False) -> _Function:
    """Compile, with the machine code kept on disk where a folder for it is writable.

    Args:
        fastmath: what the compiler may assume or reorder, as numba's option of that name.
        inlined: into every caller, so that what is constant there is constant here.
    """
    options: dict[str, Any] = {
        "nogil": True,
        "fastmath": fastmath,
        "forceinline": inlined,
        # Division by zero gives infinity; a check for it would keep loops from becoming vector instructions.
        "error_model": "numpy",
    }
    try:
        found: _Function = numba.njit(function, cache=True, **options)
    except RuntimeError:
        found = numba.njit(function, **options)
    return found
