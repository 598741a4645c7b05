"""The field of noise as the package's compiled code computes it, whole: what races are compared with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.protocol.sampling import NoiseKey
from paceline.runtime.compiled import compiled
from paceline.sampling.noise import Stream, Words, exponential_of, random_words


@compiled
def exponentials_of(words: Words) -> NDArray[np.float32]:
    """E of [n] integers."""
    result = np.empty(words.size, np.float32)
    for i in range(words.size):
        result[i] = exponential_of(words[i])
    return result


def exponentials(
    key: NoiseKey, stream: Stream, position: int, vocab_size: int, round_key: int = 0
) -> NDArray[np.float32]:
    """E of ids 0 … V-1, each Exp(1). Returns [V]."""
    return exponentials_of(random_words(key, stream, position, vocab_size, round_key))
