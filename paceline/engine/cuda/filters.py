"""What top-k, top-p and min-p need to know of whole rows, where the logits are.

That is how much of the mass stands before an id.

An id of score s stands behind the greater scores, and behind equals of lower ids. By `paceline.sampling.distribution`

- top-k keeps it if s is not below the k-th largest score;
- top-p, if the ids before it have less than `top_p` of the mass of what top-k keeps;
- min-p, if its probability over the largest one is not below `min_p`.

Scores are the definition's, for a division is rounded alike everywhere. So what top-k and min-p say is exact: the
device compares with the k-th score, the host computes the ratio of two scores. Shares of the mass are sums of rounded
numbers: one within `SHARE_ERROR` of `top_p` decides nothing, and the row is read.

Why the bound is enough. With w = exp(-d), d the distance to the largest score, P = Σ w before / Σ w kept. The device
subtracts and takes exp in float32, so w is off by at most 2^-24 · d + 2^-22 of itself; it adds in float64. P is off
by at most twice the mean of that error under p. The mean of d is at most the entropy, since -log p = d + log Σ w ≥
d, and so at most log V. With V < 2^20, 2 · (2^-24 · log V + 2^-22) < 36 · 2^-24. The definition's own sums, in
float64 one id after the other, are off by less than (V + 100) · 2^-52 < 2^-31. `SHARE_ERROR` is 64 · 2^-24.
"""

from __future__ import annotations

import torch

from paceline.sampling.noise import WORD

MOST_K = 128
"""The largest `top_k` that the device knows; more than model cards name."""
SHARE_ERROR = 2.0**-18
_VALUE_BITS = 0x7FFFFFFF
"""Of a float32, its sign apart."""


def shares_before(
    logits: torch.Tensor, temperatures: torch.Tensor, top_k: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """The share of the mass, as top-p has it, that stands before some ids of each row.

    Args:
        logits: [n, V] float32.
        temperatures: [n] float32; 0: greedy, which counts as 1.
        top_k: [n] int64, at most `MOST_K`; 0: all.
        ids: [n, m] int64.

    Returns:
        [n, m] float64, exactly 0 for the first; infinite where top-k drops the id itself.
    """
    vocab_size = logits.shape[1]
    scores = logits / temperatures.masked_fill(temperatures == 0, 1.0)[:, None] + 0.0  # makes 0 of -0, its equal
    largest = scores.topk(min(MOST_K, vocab_size), dim=1).values
    place = (top_k - 1).clamp(0, largest.shape[1] - 1)[:, None]
    least = largest.gather(1, place).masked_fill((top_k == 0)[:, None], -torch.inf)
    weights = (scores - largest[:, :1]).exp().double()
    total = (weights * (scores >= least)).sum(dim=1)
    # One integer sorts by score, then by id: a float's bits sort as an integer does, once negative ones are turned.
    bits = scores.view(torch.int32).long()
    keys = (bits ^ (bits >> 31 & _VALUE_BITS)) << 32 | WORD - torch.arange(vocab_size, device=logits.device)
    masses = [(weights * (keys > key[:, None])).sum(dim=1) for key in keys.gather(1, ids).unbind(1)]
    shares = torch.stack(masses, dim=1) / total[:, None]
    return shares.masked_fill(scores.gather(1, ids) < least, torch.inf)
