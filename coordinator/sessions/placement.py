"""Placement of sessions: on the peer that has the prefix cached, unless it is overloaded; else on the least loaded.

The coordinator does not ask what a service has cached. It remembers which tokens it sent to which peer, in a bounded
memory of blocks. A service may have dropped some since: a wrong guess costs a prefill, never a token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

Place = TypeVar("Place", bound=Hashable)

BLOCK_TOKENS = 64
"""Tokens that are remembered together; a shorter common prefix is not worth a busier peer."""
MAX_BLOCKS = 1 << 16
"""About four million tokens; a block takes some 200 bytes."""
MOST_UNEVEN = 2.0
"""A peer with up to this many times the least load may be preferred for its cache. A step's time grows at most in
proportion to its sessions, so a session there is at worst half as fast."""
ALWAYS_EVEN = 4
"""Loads that differ by up to this many sessions count as even: small batches cost little more than one session."""


class PrefixMemory:
    """Remembers which tokens were sent to which place: the latest `max_blocks` blocks of all places together."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._blocks: OrderedDict[tuple[Hashable, int], None] = OrderedDict()
        self._max_blocks = max_blocks

    def remember(self, place: Hashable, token_ids: Sequence[int], tenant: str = "") -> None:
        """Note that a place has these tokens of this tenant now."""
        for key in _keys(tenant, token_ids):
            self._blocks[place, key] = None
            self._blocks.move_to_end((place, key))
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

    def longest(self, places: Sequence[Place], token_ids: Sequence[int], tenant: str = "") -> dict[Place, int]:
        """The number of leading tokens that each place has of a prefix, in whole blocks.

        Tenants are separate, as in the targets' caches. So a session's place tells nobody what other tenants sent.
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


def choose(loads: Mapping[Place, float], cached_tokens: Mapping[Place, int]) -> Place:
    """Choose a session's place: of those not overloaded the one with most of its prefix, then the least loaded.

    Args:
        loads: the number of sessions of each place; at least one place.
        cached_tokens: the number of the prefix's tokens that each place has.
    """
    most = max(MOST_UNEVEN * min(loads.values()), min(loads.values()) + ALWAYS_EVEN)
    return max(loads, key=lambda place: (loads[place] <= most, cached_tokens[place], -loads[place]))


def _keys(tenant: str, token_ids: Sequence[int]) -> Iterator[int]:
    """A key for each whole block: a hash of the tenant and of all tokens up to the block's end."""
    key = hash(tenant)
    for end in range(BLOCK_TOKENS, len(token_ids) + 1, BLOCK_TOKENS):
        key = hash((key, *token_ids[end - BLOCK_TOKENS : end]))
        yield key
