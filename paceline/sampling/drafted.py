"""The noise key that a draft gets of a request, and the token that its q gives.

Coupled acceptance: draft and target race the same noise, so a draft holds the request's own key. It can't change
the text with it, only know it beforehand.

Rejection and block acceptance: exactness needs draws of the draft that are independent of the accept draws, the
recovered tokens and the bonus (`exactness` §1b). So a draft holds a key of its own, from which the request's can't
be computed, and the coordinator, which has both, draws each proposed token again from the q that came with it.
"""

from __future__ import annotations

import hashlib

import numpy as np

from paceline.protocol.proposal import Acceptance, SparseDistribution
from paceline.protocol.sampling import NoiseKey
from paceline.sampling.noise import Stream, address_of, uniform
from paceline.sampling.racing import race_values

DRAFT = b"paceline draft"
"""The purpose of the digest, a draft's key: another use of the seed would need another one."""
SEED_BYTES = 8
ROUNDING = 2.0**-22
"""Most that another machine's logarithms may add to a value of a race.

E is rounded to float32, so a last place of its logarithm may move log E by 2^-23; a logarithm of q in float64 moves
less by orders. On one machine the arithmetic of draft and coordinator is the same and nothing moves.
"""


def draft_key(noise: NoiseKey, acceptance: Acceptance) -> NoiseKey:
    """The key that a draft service gets: the request's own if coupled, else a digest (BLAKE2b) of it."""
    if acceptance is Acceptance.COUPLED:
        return noise
    seed = noise.seed.to_bytes(SEED_BYTES, "little")
    digest = hashlib.blake2b(seed, digest_size=SEED_BYTES, person=DRAFT).digest()
    return NoiseKey(int.from_bytes(digest, "little"), noise.sample_index)


def redraw(support: SparseDistribution, proposed: int, noise: NoiseKey, position: int, round_key: int) -> int:
    """The token that a draft's race draws from a support: `proposed`, if rounding alone parts it from the best.

    It is the race of `support_scores` over the whole vocabulary, without the ids that can't win.

    Args:
        support: q, as it was sent.
        proposed: an id of it.
        noise: the draft's key.
        position: absolute index of the token.
        round_key: base length of the round that carries it.

    Raises:
        InvalidInput: a position or round key beyond 32 bits.
    """
    address = address_of(noise, Stream.DRAFT, position, round_key)
    values = race_values(np.log(np.array(support.probabilities)), np.array(support.token_ids, np.intp), *address)
    best = int(values.argmax())  # the first of equals, and ids ascend
    if values[support.token_ids.index(proposed)] >= values[best] - ROUNDING:
        return proposed
    return support.token_ids[best]


def warm_up() -> None:
    """Compile what a coordinator draws with (or load it from the cache), so that no request pays for it."""
    key = NoiseKey(seed=0)
    uniform(key, Stream.ACCEPT, 0)
    redraw(SparseDistribution((0,), (1.0,)), 0, key, 0, 0)
