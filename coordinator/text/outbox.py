"""Back-pressure of a client that reads slowly on its rounds.

Pending text coalesces into one write in flight. Beyond `MAX_UNREAD_BYTES` the
rounds pause; after `FREE_AFTER_S` their KV is freed (the sessions are opened again
when the client reads), and after `CANCEL_AFTER_S` the request is cancelled.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import accumulate, chain

from paceline.protocol.errors import Cancelled
from paceline.protocol.generation import PromptLogprobs, Tokens

MAX_UNREAD_BYTES = 256 * 1024
FREE_AFTER_S = 5.0
CANCEL_AFTER_S = 60.0
BYTES_PER_TOKEN = 12
"""Upper bound of a token on the wire: id, provenance, end of its text, the token that it replaced, and their tags."""
BYTES_PER_RECORD = 132
"""Upper bound of a round's record on the wire without its drafter's name: 16 fields, twice 6 of timings, tags."""
MOST_BYTES_PER_TOKEN = 1024
"""Upper bound of a token on the wire with its log-probabilities and its text."""


class Outbox:
    """A buffer of what the client has not read yet; one task writes it with `run`."""

    def __init__(
        self,
        write: Callable[[PromptLogprobs | Tokens], Awaitable[None]],
        free: Callable[[], None],
        count: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        self._write = write
        self._free = free
        self._count = count
        self._prompt = deque[PromptLogprobs]()
        self._pending: list[Tokens] = []
        self._unread = 0
        self._nonempty = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def put(self, tokens: Tokens) -> None:
        """Add text; never blocks. `count` gets the number of its tokens, whether the client reads them or not."""
        self._count(len(tokens.token_ids))
        self._pending.append(tokens)
        self._unread += size_of(tokens)
        self._empty.clear()
        self._nonempty.set()

    def put_prompt(self, rows: PromptLogprobs) -> None:
        """Add log-probabilities of the prompt, before any text; never blocks."""
        self._prompt.append(rows)
        self._unread += prompt_size(rows)
        self._empty.clear()
        self._nonempty.set()

    @property
    def is_full(self) -> bool:
        """Whether so much is unread that rounds pause."""
        return self._unread > MAX_UNREAD_BYTES

    @property
    def room(self) -> int:
        """Tokens that may still come before the rounds pause."""
        return max(0, MAX_UNREAD_BYTES - self._unread) // MOST_BYTES_PER_TOKEN

    async def has_room(self) -> None:
        """Wait while too much is unread; called before each round.

        Raises:
            Cancelled: the client took nothing for `CANCEL_AFTER_S`.
        """
        if self.is_full:
            await self.wait_for_reader()

    async def run(self) -> None:
        """Write all that is pending as one message, again and again, until cancelled."""
        while True:
            await self._nonempty.wait()
            self._nonempty.clear()
            while self._prompt:
                rows = self._prompt.popleft()
                await self._write(rows)
                self._unread -= prompt_size(rows)
            batch, self._pending = self._pending, []
            if batch:
                await self._write(merge(batch))
                self._unread -= sum(size_of(tokens) for tokens in batch)
            if not self._pending and not self._prompt:
                self._empty.set()

    async def drain(self) -> None:
        """Return once everything is written."""
        await self._empty.wait()

    async def wait_for_reader(self) -> None:
        """Return once everything is read. It frees the request's sessions when that takes long.

        Raises:
            Cancelled: the client took nothing for `CANCEL_AFTER_S`.
        """
        for patience, give_up in ((FREE_AFTER_S, self._free), (CANCEL_AFTER_S - FREE_AFTER_S, _cancel)):
            try:
                async with asyncio.timeout(patience):
                    await self._empty.wait()
                return
            except TimeoutError:
                give_up()
        return


def size_of(tokens: Tokens) -> int:
    """Upper bound of the bytes that a message takes on the wire."""
    records = sum(BYTES_PER_RECORD + len(record.drafter.encode()) for record in tokens.records)
    return len(tokens.text.encode()) + BYTES_PER_TOKEN * len(tokens.token_ids) * (1 + len(tokens.logprobs)) + records


def prompt_size(rows: PromptLogprobs) -> int:
    """Upper bound of the bytes that a part of the prompt's report takes on the wire."""
    return BYTES_PER_TOKEN * sum(1 + len(row.token_ids) for row in rows.rows)


def merge(batch: list[Tokens]) -> Tokens:
    """Merge several messages into one."""
    if len(batch) == 1:
        return batch[0]
    starts = accumulate((len(tokens.text) for tokens in batch), initial=0)
    return Tokens(
        token_ids=tuple(chain.from_iterable(tokens.token_ids for tokens in batch)),
        text="".join(tokens.text for tokens in batch),
        provenance=tuple(chain.from_iterable(tokens.provenance for tokens in batch)),
        logprobs=tuple(chain.from_iterable(tokens.logprobs for tokens in batch)),
        text_ends=tuple(
            start + end for start, tokens in zip(starts, batch, strict=False) for end in tokens.text_ends
        ),
        replaced_token_ids=tuple(chain.from_iterable(tokens.replaced_token_ids for tokens in batch)),
        records=tuple(chain.from_iterable(tokens.records for tokens in batch)),
    )


def _cancel() -> None:
    raise Cancelled(f"the client left more than {MAX_UNREAD_BYTES} bytes unread for {CANCEL_AFTER_S:g} s")
