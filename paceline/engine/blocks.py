"""Blocks of KV rows that sessions with a common prefix compute once. Pure bookkeeping; engines bring the rows.

A block's key hashes its tenant and every token up to the block's end, so equal keys mean equal rows of one tenant.
Sessions keep their rows contiguous and copy blocks in and out: a step reads one stretch of memory per session, and
evicting a block takes nothing from any session (docs/decisions/2026-11-21-shared-blocks-are-copied.md).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from paceline.engine.interface import Prefix

BLOCK_ROWS = 32
"""Rows of a full block, chosen, not tuned (docs/decisions/2026-11-21-shared-blocks-are-copied.md).

A prefix that ends inside a block gets a shorter one at its end.
"""

Rows = TypeVar("Rows")
"""An engine's storage of a block's rows."""


@dataclass(frozen=True)
class BlockKey:
    """Rows [start, end) behind one certain path of tokens."""

    digest: bytes
    start: int
    end: int

    @property
    def rows(self) -> int:
        """Rows of the block."""
        return self.end - self.start


@dataclass(frozen=True)
class Sharing:
    """Facts that keys depend on beside tokens: whose rows they are, and how they were computed.

    `prompt_rows`: in reproducible mode, how many of the session's rows have the
    prompt's shape; rows of different shapes differ in their last bits. None:
    shapes vary anyway.
    """

    tenant: str = ""
    prompt_rows: int | None = None


def sharing_of(prefix: Prefix, *, reproducible: bool) -> Sharing:
    """The sharing of a session that begins with a prefix; `reproducible`: in reproducible mode."""
    return Sharing(prefix.tenant, prefix.prompt_rows if reproducible else None)


def block_key(previous: BlockKey | None, tokens: Sequence[int], sharing: Sharing) -> BlockKey:
    """The key of a block of `tokens` behind another one."""
    start = 0 if previous is None else previous.end
    end = start + len(tokens)
    # Keyed, not prefixed: no tenant's name can pass for tokens.
    key, path = (sharing.tenant.encode(), b"") if previous is None else (b"", previous.digest)
    digest = hashlib.blake2b(path, digest_size=16, key=key)
    if sharing.prompt_rows is not None:
        digest.update(array("q", [min(max(sharing.prompt_rows - start, 0), len(tokens))]).tobytes())
    digest.update(array("q", tokens).tobytes())
    return BlockKey(digest.digest(), start, end)


def prefix_keys(prefix: Prefix, *, reproducible: bool) -> tuple[BlockKey, ...]:
    """Keys of all rows of a prefix but its last token's, which is computed anew for its logits."""
    usable, sharing = prefix.token_ids[:-1], sharing_of(prefix, reproducible=reproducible)
    keys: list[BlockKey] = []
    for start in range(0, len(usable), BLOCK_ROWS):
        tokens = usable[start : start + BLOCK_ROWS]
        keys.append(block_key(keys[-1] if keys else None, tokens, sharing))
    return tuple(keys)


class BlockChain:
    """Keys of one session's blocks, hashed once their rows are settled: kept by a round, or part of the prefix.

    `keys` are those of the prefix, `cached_keys` those of the blocks that the session began with.
    """

    def __init__(self, keys: Sequence[BlockKey], cached_keys: Sequence[BlockKey], sharing: Sharing) -> None:
        self._tail = keys[-1] if keys and keys[-1].rows < BLOCK_ROWS else None
        self._sharing = sharing
        self._full = [key for key in cached_keys if key.rows == BLOCK_ROWS]
        self._tail_returned = len(cached_keys) > len(self._full)

    def roll_back(self, rows: int) -> None:
        """Drop all rows but the first `rows`."""
        del self._full[rows // BLOCK_ROWS :]
        self._tail_returned = self._tail_returned and self._tail is not None and rows >= self._tail.end

    def settle(self, tokens: Sequence[int], rows: int) -> list[BlockKey]:
        """The blocks that are complete now that the first `rows` of `tokens` are settled; each is returned once."""
        complete: list[BlockKey] = []
        while (len(self._full) + 1) * BLOCK_ROWS <= rows:
            start = len(self._full) * BLOCK_ROWS
            previous = self._full[-1] if self._full else None
            self._full.append(block_key(previous, tokens[start : start + BLOCK_ROWS], self._sharing))
            complete.append(self._full[-1])
        tail = self._tail
        if tail is not None and tail.end <= rows and not self._tail_returned:
            previous = self._full[tail.start // BLOCK_ROWS - 1] if tail.start else None
            self._tail_returned = True
            complete.append(block_key(previous, tokens[tail.start : tail.end], self._sharing))
        return complete


@dataclass
class _Block(Generic[Rows]):
    """`users`: open sessions that read or computed it."""

    key: BlockKey
    rows: Rows
    users: int


def _forget(rows: object) -> None:
    """The default `release`: no other record of the rows is kept."""


class BlockStore(Generic[Rows]):
    """Blocks by key. Those that no open session uses are evicted first, the least recently used one before others.

    Args:
        whole_pages: whether a shorter block takes the room of a full one.
        release: called with the rows of every block that is evicted.
    """

    def __init__(self, *, whole_pages: bool = False, release: Callable[[Rows], None] = _forget) -> None:
        self._whole_pages = whole_pages
        self._release = release
        self._idle: OrderedDict[bytes, _Block[Rows]] = OrderedDict()
        self._in_use: OrderedDict[bytes, _Block[Rows]] = OrderedDict()
        self._rows = 0

    @property
    def held_rows(self) -> int:
        """Rows of all blocks, as they are budgeted."""
        return self._rows

    def cost(self, key: BlockKey) -> int:
        """Rows that a block takes."""
        return BLOCK_ROWS if self._whole_pages else key.rows

    def match(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """The longest run of keys, from the first on, whose blocks are stored."""
        hits: list[BlockKey] = []
        for key in keys:
            if key.digest not in self._idle and key.digest not in self._in_use:
                break
            hits.append(key)
        return hits

    def use(self, keys: Sequence[BlockKey]) -> list[Rows]:
        """Count one session more for each of these stored blocks, and return their rows."""
        blocks = []
        # The first block of a chain is used last, so that chains are evicted from their ends.
        for key in reversed(keys):
            block = self._idle.pop(key.digest, None) or self._in_use.pop(key.digest)
            block.users += 1
            self._in_use[key.digest] = block
            blocks.append(block.rows)
        return blocks[::-1]

    def release(self, keys: Sequence[BlockKey]) -> None:
        """One session less for each of these blocks; evicted ones are ignored."""
        for key in reversed(keys):
            block = self._in_use.get(key.digest)
            if block is not None:
                block.users -= 1
                if not block.users:
                    self._idle[key.digest] = self._in_use.pop(key.digest)

    def put(self, key: BlockKey, rows: Rows) -> None:
        """Store a new block, used by one session."""
        self._in_use[key.digest] = _Block(key, rows, 1)
        self._rows += self.cost(key)

    def evict_to(self, rows: int, *, idle_only: bool = False) -> bool:
        """Evict blocks, idle ones first, until at most `rows` rows are stored; returns whether that was possible."""
        for blocks in (self._idle,) if idle_only else (self._idle, self._in_use):
            while blocks and self._rows > rows:
                _, block = blocks.popitem(last=False)
                self._rows -= self.cost(block.key)
                self._release(block.rows)
        return self._rows <= rows
