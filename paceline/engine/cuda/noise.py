"""The race of `paceline.sampling.racing` on a device: the same integers, and every id that may be among its best.

Integers are exact on every device, logarithms are not: they may differ in the last bits. So a device does not
say who won. It finds the ids whose value lies within `MARGIN` of the best, by its own float32 arithmetic, and
the host decides among those few by the one definition (`paceline.sampling.racing.race_among`).

Why the margin is enough. Let v be an id's value by the definition, v' the device's, and |v' - v| ≤ δ for all.
With t the m-th largest v' and w the m-th largest v, at least m ids have v ≥ t - δ, so w ≥ t - δ, and whoever is
among the m best has v' ≥ w - δ ≥ t - 2δ. For scores s the error is that of three float32 operations: below
2^-21 · (|s| + 24), for -log E lies in [-3.2, 23]; `margin` allows 2^-20 · |t| + 1e-3 for 2δ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.protocol.errors import Unsupported
from paceline.protocol.sampling import NoiseKey
from paceline.sampling.noise import MULTIPLIERS, ROUNDS, WEYL, WORD, Stream, address_of
from paceline.sampling.racing import race_values

Number = TypeVar("Number", float, NDArray[np.float64])
MARGIN, RELATIVE_MARGIN = 1e-3, 2.0**-20
_CHECKED_IDS, _BEST_IDS = 1027, 16
Race = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
"""As `race_candidates`."""


def margin(value: Number) -> Number:
    """How far below a value an id may be, by the device's arithmetic, and still be ahead by the definition."""
    return MARGIN + RELATIVE_MARGIN * abs(value)


def words(counters: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The integers of ids 0 … V-1, Philox4x32-10 in 64-bit arithmetic.

    Args:
        counters: [n, 4] int64: position, tag (stream | sample << 8), low and high word of the key; round key 0.
        vocab_size: V.

    Returns:
        [n, V] int64, each in [0, 2^32).
    """
    position, tag, low, high = (counters[:, i : i + 1] for i in range(4))
    c0 = torch.arange(-(-vocab_size // 4), device=counters.device).expand(len(counters), -1)
    c1, c2, c3 = position, torch.zeros_like(position), tag
    for step in range(ROUNDS):
        # Products wrap modulo 2^64, and a shift to the right brings copies of the sign: masks take both away.
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        key_low, key_high = low + step * WEYL[0], high + step * WEYL[1]
        c0 = ((second >> 32) ^ c1 ^ key_low) & WORD
        c2 = ((first >> 32) ^ c3 ^ key_high) & WORD
        c1, c3 = second & WORD, first & WORD
    lanes = torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), dim=2)
    return lanes.flatten(1)[:, :vocab_size]


def log_exponentials(integers: torch.Tensor) -> torch.Tensor:
    """log E of integers x, float32, off by less than 2^-20: E = -log1p(-u), u = (x + 0.5) / 2^32."""
    u = (integers.float() + 0.5) * 2.0**-32
    # Close to 1, float32 has no room for u but plenty for 1 - u.
    rest = ((WORD - integers).float() + 0.5) * 2.0**-32
    return torch.where(u < 0.5, -torch.log1p(-u), -torch.log(rest)).log()


def race_candidates(
    logits: torch.Tensor, counters: torch.Tensor, temperatures: torch.Tensor, count: int
) -> torch.Tensor:
    """The best of each row, by the device's arithmetic.

    Args:
        logits: [n, V] float32.
        counters: as for `words`.
        temperatures: [n] float32; 0: the largest logits, without noise.
        count: how many of each row.

    Returns:
        [n, 2 + 3 · count] float64: the largest logit (NaN if there is one), the logarithm of Σ exp(logit / T) with
        T = 1 for greedy rows; then values, best first, their ids, and their logits.
    """
    greedy = (temperatures == 0)[:, None]
    scores = logits / temperatures[:, None].masked_fill(greedy, 1.0)
    noise = log_exponentials(words(counters, logits.shape[1]))
    values, ids = torch.where(greedy, logits, scores - noise).topk(count, dim=1)
    columns = (
        logits.amax(dim=1, keepdim=True).double(),
        scores.logsumexp(dim=1, keepdim=True).double(),
        values.double(),
        ids.double(),
        logits.gather(1, ids).double(),
    )
    return torch.cat(columns, dim=1)


def check_race(device: torch.device, race: Race = race_candidates) -> None:
    """Compare the best of some races on a device, and their values, with the definition.

    Raises:
        Unsupported: they differ.
    """
    keys = (NoiseKey(0), NoiseKey(0x1234_5678_9ABC_DEF0, 5), NoiseKey((1 << 64) - 1, (1 << 24) - 1))
    positions = (0, 77, WORD)
    counters = [counter_of(key, position) for key, position in zip(keys, positions, strict=True)]
    logits = torch.zeros((len(keys), _CHECKED_IDS), device=device)
    ones = torch.ones(len(keys), device=device)
    candidates = race(logits, torch.tensor(counters, device=device), ones, _BEST_IDS).cpu().numpy()
    for key, position, row in zip(keys, positions, candidates, strict=True):
        values, ids, _ = row[2:].reshape(3, -1)
        by_definition = race_values(
            np.zeros(_CHECKED_IDS, np.float32), np.arange(_CHECKED_IDS), *address_of(key, Stream.DRAFT, position, 0)
        )
        best = np.argsort(-by_definition)[:_BEST_IDS]
        error = np.abs(values - by_definition[best])
        if sorted(ids) != sorted(best) or not (error <= margin(by_definition[best]) / 2).all():
            raise Unsupported(f"device {device}: its arithmetic gives other noise than the reference")


def counter_of(key: NoiseKey, position: int, stream: Stream = Stream.DRAFT) -> tuple[int, int, int, int]:
    """A row of `counters`."""
    return position, int(stream) | key.sample_index << 8, key.seed & WORD, key.seed >> 32
