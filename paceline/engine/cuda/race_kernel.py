"""`noise.race_candidates` in one Triton kernel, which tests on a CPU run under Triton's interpreter.

A program races one block of a row's ids and hands on the best of them, so noise and values never leave the chip; what
remains for the library is to choose among the blocks. Noise is made in float64, as the definition makes it: a value
differs from the definition's by its rounding to float32, far within `noise.margin`. Greedy rows make no noise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.sampling.noise import WORD

BLOCK_IDS = 4096
"""Ids that a program races. Chosen, not tuned."""
_VALUE_BITS = 0x7FFFFFFF
"""Of a float32, its sign apart."""
NUMBERS = ("counters", "temperatures", "largest", "log_sums")
"""Addresses whose alignment makes no kernel of its own: it differs with the number of rows, and little lies there."""


def race_candidates(
    logits: torch.Tensor, counters: torch.Tensor, temperatures: torch.Tensor, count: int
) -> torch.Tensor:
    """As `noise.race_candidates`; of equal values the lowest ids come first."""
    rows, vocab_size = logits.shape
    blocks = -(-vocab_size // BLOCK_IDS)
    keys = torch.empty((rows, blocks, count), dtype=torch.int64, device=logits.device)
    sums = torch.empty((2, rows, blocks), dtype=torch.float32, device=logits.device)
    counters, temperatures = counters.contiguous(), temperatures.contiguous()
    _race[(rows, blocks)](
        logits, counters, temperatures, keys, *sums, vocab_size, logits.stride(0), block_ids=BLOCK_IDS, best=count
    )
    best_keys = keys.flatten(1).topk(count, dim=1).values
    ids, high = WORD - (best_keys & WORD), (best_keys >> 32).int()
    values = (high ^ ((high >> 31) & _VALUE_BITS)).view(torch.float32)
    columns = (sums[0].amax(dim=1, keepdim=True), sums[1].logsumexp(dim=1, keepdim=True), values)
    return torch.cat((*(each.double() for each in columns), ids.double(), logits.gather(1, ids).double()), dim=1)


@triton.jit(do_not_specialize_on_alignment=NUMBERS)  # type: ignore[untyped-decorator]
def _race(  # type: ignore[no-untyped-def]  # the kernel's arguments are addresses and numbers
    logits,
    counters,
    temperatures,
    keys,
    largest,
    log_sums,
    vocab_size,
    stride,
    block_ids: tl.constexpr,
    best: tl.constexpr,
):
    """Of one block of one row: the best values as keys, the largest logit, the logarithm of the sum.

    A key is 64 bits: a value's, which sort as an integer does, above those of WORD - id.
    """
    row, block = tl.program_id(0), tl.program_id(1)
    ids = block * block_ids + tl.arange(0, block_ids)
    inside = ids < vocab_size
    own_logits = tl.load(logits + row.to(tl.int64) * stride + ids, mask=inside, other=float("-inf"))
    temperature = tl.load(temperatures + row)
    divisor = tl.where(temperature == 0, 1.0, temperature).to(tl.float64)
    scores = (own_logits.to(tl.float64) / divisor).to(tl.float32)  # as float32 divides: float64 has room enough
    values = own_logits
    if temperature != 0:
        first = (block * (block_ids // 4) + tl.arange(0, block_ids // 4)).to(tl.uint32)
        counter = counters + row * 4
        position, tag = tl.load(counter).to(tl.uint32), tl.load(counter + 1).to(tl.uint32)
        low, high = tl.load(counter + 2).to(tl.uint32), tl.load(counter + 3).to(tl.uint32)
        x0, x1, x2, x3 = tl.philox_impl(first, first * 0 + position, first * 0, first * 0 + tag, low, high)
        words = tl.interleave(tl.interleave(x0, x2), tl.interleave(x1, x3))
        # 1 - u is exact in float64, so its logarithm is that of the definition.
        exponentials = -tl.log(1.0 - (words.to(tl.float64) + 0.5) * (1.0 / 4294967296.0))
        values = (scores.to(tl.float64) - tl.log(exponentials.to(tl.float32).to(tl.float64))).to(tl.float32)
    bits = values.to(tl.int32, bitcast=True)
    sortable = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    own_keys = tl.where(inside, (sortable << 32) | (0xFFFFFFFF - ids.to(tl.int64)), -(2**63))
    place = row * tl.num_programs(1) + block
    for rank in range(best):
        top_key = tl.max(own_keys, axis=0)
        tl.store(keys + place * best + rank, top_key)
        own_keys = tl.where(own_keys == top_key, -(2**63), own_keys)
    is_bad = tl.max((own_logits != own_logits).to(tl.int32), axis=0) > 0
    tl.store(largest + place, tl.where(is_bad, float("nan"), tl.max(own_logits, axis=0)))
    top = tl.max(scores, axis=0)
    top = tl.where(tl.abs(top) < float("inf"), top, 0.0)
    tl.store(log_sums + place, top + tl.log(tl.sum(tl.exp(scores - top), axis=0)))
