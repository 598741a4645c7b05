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
"""What an engine keeps for the rows of a block."""


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
    """What keys tell apart beside tokens: whose rows they are, and how they were computed.

    `prompt_rows`: in reproducible mode, how many of the session's rows have the
    prompt's shape; rows of different shapes differ in their last bits. None:
    shapes vary anyway.
    """

    tenant: str = ""
    prompt_rows: int | None = None


def sharing_of(prefix: Prefix, *, shaped: bool) -> Sharing:
    """Of a session that begins with a prefix; `shaped`: in reproducible mode."""
    return Sharing(prefix.tenant, prefix.prompt_rows if shaped else None)


def block_key(before: BlockKey | None, tokens: Sequence[int], sharing: Sharing) -> BlockKey:
    """The key of a block of `tokens` behind another one."""
    start = 0 if before is None else before.end
    end = start + len(tokens)
    # Keyed, not prefixed: no tenant's name can pass for tokens.
    key, path = (sharing.tenant.encode(), b"") if before is None else (b"", before.digest)
    digest = hashlib.blake2b(path, digest_size=16, key=key)
    if sharing.prompt_rows is not None:
        digest.update(array("q", [min(max(sharing.prompt_rows - start, 0), len(tokens))]).tobytes())
    digest.update(array("q", tokens).tobytes())
    return BlockKey(digest.digest(), start, end)


def prefix_keys(prefix: Prefix, *, shaped: bool) -> tuple[BlockKey, ...]:
    """Keys of all rows of a prefix but its last token's, which is computed anew for its logits."""
    usable, sharing = prefix.token_ids[:-1], sharing_of(prefix, shaped=shaped)
    keys: list[BlockKey] = []
    for start in range(0, len(usable), BLOCK_ROWS):
        tokens = usable[start : start + BLOCK_ROWS]
        keys.append(block_key(keys[-1] if keys else None, tokens, sharing))
    return tuple(keys)


class BlockChain:
    """Keys of one session's blocks, hashed once their rows are settled: kept by a round, or the prefix's own.

    `keys` are the prefix's, `found` those that the session began with.
    """

    def __init__(self, keys: Sequence[BlockKey], found: Sequence[BlockKey], sharing: Sharing) -> None:
        self._tail = keys[-1] if keys and keys[-1].rows < BLOCK_ROWS else None
        self._sharing = sharing
        self._full = [key for key in found if key.rows == BLOCK_ROWS]
        self._tail_told = len(found) > len(self._full)

    def roll_back(self, rows: int) -> None:
        """Only the first `rows` rows are what they were."""
        del self._full[rows // BLOCK_ROWS :]
        self._tail_told = self._tail_told and self._tail is not None and rows >= self._tail.end

    def settle(self, tokens: Sequence[int], rows: int) -> list[BlockKey]:
        """The blocks that are complete now that the first `rows` of `tokens` are settled, each told once."""
        complete: list[BlockKey] = []
        while (len(self._full) + 1) * BLOCK_ROWS <= rows:
            start = len(self._full) * BLOCK_ROWS
            before = self._full[-1] if self._full else None
            self._full.append(block_key(before, tokens[start : start + BLOCK_ROWS], self._sharing))
            complete.append(self._full[-1])
        tail = self._tail
        if tail is not None and tail.end <= rows and not self._tail_told:
            before = self._full[tail.start // BLOCK_ROWS - 1] if tail.start else None
            self._tail_told = True
            complete.append(block_key(before, tokens[tail.start : tail.end], self._sharing))
        return complete


@dataclass
class _Block(Generic[Rows]):
    """`users`: open sessions that took or gave it."""

    key: BlockKey
    rows: Rows
    users: int


def _forget(rows: object) -> None:
    """Rows that nothing else counts."""


class BlockStore(Generic[Rows]):
    """Blocks by key. Those that no open session uses are evicted first, the one used longest ago before others.

    Args:
        paged: whether a shorter block takes the room of a full one.
        release: told the rows of every block that is evicted.
    """

    def __init__(self, *, paged: bool = False, release: Callable[[Rows], None] = _forget) -> None:
        self._paged = paged
        self._release = release
        self._idle: OrderedDict[bytes, _Block[Rows]] = OrderedDict()
        self._used: OrderedDict[bytes, _Block[Rows]] = OrderedDict()
        self._held = 0

    @property
    def held_rows(self) -> int:
        """Rows of all blocks, as they are budgeted."""
        return self._held

    def cost(self, key: BlockKey) -> int:
        """Rows that a block takes."""
        return BLOCK_ROWS if self._paged else key.rows

    def match(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """The longest run of keys, from the first on, that are here."""
        found: list[BlockKey] = []
        for key in keys:
            if key.digest not in self._idle and key.digest not in self._used:
                break
            found.append(key)
        return found

    def use(self, keys: Sequence[BlockKey]) -> list[Rows]:
        """Count one session more for each of these blocks, all here, and return their rows."""
        blocks = []
        # The first block of a chain is used last, so that chains are evicted from their ends.
        for key in reversed(keys):
            block = self._idle.pop(key.digest, None) or self._used.pop(key.digest)
            block.users += 1
            self._used[key.digest] = block
            blocks.append(block.rows)
        return blocks[::-1]

    def release(self, keys: Sequence[BlockKey]) -> None:
        """One session less for each of these blocks; evicted ones are ignored."""
        for key in reversed(keys):
            block = self._used.get(key.digest)
            if block is not None:
                block.users -= 1
                if not block.users:
                    self._idle[key.digest] = self._used.pop(key.digest)

    def put(self, key: BlockKey, rows: Rows) -> None:
        """Add a block that is not here, used by one session."""
        self._used[key.digest] = _Block(key, rows, 1)
        self._held += self.cost(key)

    def evict_to(self, rows: int, *, idle_only: bool = False) -> bool:
        """Evict blocks, idle ones first, until at most `rows` rows are held; returns whether it came to that."""
        for blocks in (self._idle,) if idle_only else (self._idle, self._used):
            while blocks and self._held > rows:
                _, block = blocks.popitem(last=False)
                self._held -= self.cost(block.key)
                self._release(block.rows)
        return self._held <= rows
