"""e^x in compiled code, in float32: Cephes' expf, a polynomial that becomes vector instructions.

Right to two units in the last place.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from paceline.runtime.compiled import compiled

REORDER = {"reassoc", "contract", "nsz", "arcp"}
"""Liberties of compiled sums that make them vector instructions; NaN and infinity are unchanged."""

_float = np.float32
_LOWEST = _float(-87.0)
"""Smaller exponents would leave float32's normal numbers; e^-87 adds nothing to 1."""


def _float_of_bits(typing: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.int32), generate


_from_bits: Any = intrinsic(_float_of_bits)


@partial(compiled, fastmath=REORDER, inline=True)
def exp(x: np.float32) -> np.float32:
    """In compiled code: e^x for x <= 0."""
    x = max(x, _LOWEST)
    power = np.floor(x * _float(1.44269504) + _float(0.5))  # float32: Python's floor would lead to float64
    rest = x - power * _float(0.693359375) - power * _float(-2.12194440e-4)
    value = _float(1.9875691500e-4)
    value = value * rest + _float(1.3981999507e-3)
    value = value * rest + _float(8.3334519073e-3)
    value = value * rest + _float(4.1665795894e-2)
    value = value * rest + _float(1.6666665459e-1)
    value = value * rest + _float(5.0000001201e-1)
    value = value * rest * rest + rest + _float(1)
    scale = _from_bits(np.int32((np.int32(power) + np.int32(127)) << np.int32(23)))
    return _float(value * scale)
