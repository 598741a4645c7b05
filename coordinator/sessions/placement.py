"""Which peer a session goes to: where its prefix is cached, unless that peer is overloaded; else the least loaded.

The coordinator does not ask what a service has cached. It remembers which tokens it sent where: a bounded memory of
blocks, which may be wrong about what a service has dropped since. A wrong guess costs a prefill, never a token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

Place = TypeVar("Place", bound=Hashable)

BLOCK_TOKENS = 64
"""Tokens that are remembered together: a share of a prefix below that is not worth a detour."""
MAX_BLOCKS = 1 << 16
"""About four million tokens; a block takes some 200 bytes."""
MOST_UNEVEN = 2.0
"""A peer with up to so many times the least load may be preferred for its cache. A step's time grows at most in
proportion to its sessions, so that a session is at worst half as fast there."""
ALWAYS_EVEN = 4
"""Sessions by which loads may differ in any case: small batches cost little more than one session."""


class PrefixMemory:
    """Which places were sent which tokens: the latest `max_blocks` blocks of all of them."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._blocks: OrderedDict[tuple[Hashable, int], None] = OrderedDict()
        self._max_blocks = max_blocks

    def remember(self, place: Hashable, token_ids: Sequence[int], tenant: str = "") -> None:
        """The place has these tokens of this tenant now."""
        for key in _keys(tenant, token_ids):
            self._blocks[place, key] = None
            self._blocks.move_to_end((place, key))
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

    def longest(self, places: Sequence[Place], token_ids: Sequence[int], tenant: str = "") -> dict[Place, int]:
        """How many of a tenant's tokens each place has from the first one on, in whole blocks.

        By tenant, as the targets share prefixes: where a session goes tells nobody what others have sent.
        """
        blocks = dict.fromkeys(places, 0)
        holding = list(places)
        for key in _keys(tenant, token_ids):
            holding = [place for place in holding if (place, key) in self._blocks]
            if not holding:
                break
            for place in holding:
                blocks[place] += 1
        return {place: count * BLOCK_TOKENS for place, count in blocks.items()}


def choose(loads: Mapping[Place, float], cached: Mapping[Place, int]) -> Place:
    """The place for a session: of those not overloaded the one with most of its prefix, then the least loaded.

    Args:
        loads: sessions that each place has; at least one place.
        cached: tokens of the prefix that each has.
    """
    most = max(MOST_UNEVEN * min(loads.values()), min(loads.values()) + ALWAYS_EVEN)
    return max(loads, key=lambda place: (loads[place] <= most, cached[place], -loads[place]))


def _keys(tenant: str, token_ids: Sequence[int]) -> Iterator[int]:
    """A key for each whole block, of all tokens up to its end."""
    key = hash(tenant)
    for end in range(BLOCK_TOKENS, len(token_ids) + 1, BLOCK_TOKENS):
        key = hash((key, *token_ids[end - BLOCK_TOKENS : end]))
        yield key
