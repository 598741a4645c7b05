"""One request's session on the target: rounds in, verdicts out, re-opened when it is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from coordinator.peer import Peer
from coordinator.sequence import Job
from paceline.codec import error_of
from paceline.errors import (
    Overloaded,
    PacelineError,
    PeerUnavailable,
    PrefixMismatch,
    UnknownSession,
)
from paceline.rpc.link import TargetLink
from paceline.types import (
    ROOT,
    Failure,
    Proposal,
    Round,
    TargetCommand,
    TargetEvent,
    TargetOpen,
    Verdict,
)

logger = logging.getLogger(__name__)

MAX_REFUSALS = 3
"""Re-opens in a row that a live target may answer with PREFIX_MISMATCH or UNKNOWN_SESSION."""
OPENING_BASE = -1
"""Stands for "no round in flight" in `_awaited_base`."""

Dispatched = Callable[[Round], Awaitable[None]]
"""Told of each round that was queued for the target; the verdict may come meanwhile."""


class TargetPeer(Peer[TargetCommand, TargetEvent]):
    """The link to the target, and how patient rounds are with it."""

    def __init__(self, link: TargetLink, *, round_timeout_s: float, wait_s: float) -> None:
        super().__init__(link)
        self.round_timeout_s = round_timeout_s
        self.wait_s = wait_s


class TargetSession:
    """Verifies one request's rounds, one at a time."""

    def __init__(self, peer: TargetPeer, job: Job) -> None:
        self._peer = peer
        self._job = job
        self._id: int | None = None
        self._answer: asyncio.Future[Verdict] | None = None
        self._awaited_base = OPENING_BASE
        self._opened_before = False
        self._watcher: asyncio.TimerHandle | None = None

    async def verify(
        self,
        committed: Sequence[int],
        accepted_node: int,
        proposal: Proposal | None,
        traceparent: str,
        dispatched: Dispatched,
    ) -> tuple[Round, Verdict]:
        """Send one round and wait for its verdict; a lost session is opened anew and the round sent again.

        The same round is sent again with the same proposal, so the verdict is
        the one that was lost (`exactness` §3: once drawn, nothing is redrawn).

        Raises:
            PeerUnavailable: the target did not come back in time.
            PacelineError: the target refused the session.
        """
        deadline = time.monotonic() + self._peer.wait_s
        refusals = 0
        while True:
            try:
                round_ = self._dispatch(committed, accepted_node, proposal, traceparent)
                await dispatched(round_)
                return round_, await self._verdict(round_)
            except (PeerUnavailable, Overloaded, PrefixMismatch, UnknownSession) as error:
                refusals += isinstance(error, PrefixMismatch | UnknownSession)
                first_refused = isinstance(error, Overloaded) and not self._opened_before
                if first_refused or refusals > MAX_REFUSALS or time.monotonic() >= deadline:
                    raise
                logger.warning(
                    "target session lost, opening it anew: session=%s base_length=%d error=%s",
                    self._id, len(committed) - 1, error.message,
                )  # fmt: skip
                self.close()
                await self._until_reachable(error, deadline)

    def close(self) -> None:
        """End the session on the target; the next round opens it anew."""
        if self._id is not None:
            self._peer.detach(self._id)
            self._id = None

    def on_event(self, event: TargetEvent) -> None:
        """Handle what the target sent for this session."""
        if isinstance(event, Failure):
            if event.session_closed:
                self.close()
            self._fail(error_of(event))
        elif isinstance(event, Verdict) and event.base_length == self._awaited_base:
            self._opened_before = True
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(event)

    def on_lost(self, error: PacelineError) -> None:
        """The link broke, and this session with it."""
        self._id = None
        self._fail(error)

    def _dispatch(
        self, committed: Sequence[int], accepted_node: int, proposal: Proposal | None, traceparent: str
    ) -> Round:
        """Send the round, behind an open if the session has none; nothing here waits."""
        fresh = self._id is None
        if self._id is None:
            self._id = self._open(committed, traceparent)
        round_ = Round(
            session_id=self._id,
            base_length=len(committed) - 1,
            accepted_node=ROOT if fresh else accepted_node,
            committed=(committed[-1],),
            proposal=proposal,
            traceparent=traceparent,
        )
        self._answer = asyncio.get_running_loop().create_future()
        self._awaited_base = round_.base_length
        # A session's first round must not overtake its open.
        self._peer.link.send(round_, urgent=not fresh)
        return round_

    def _open(self, committed: Sequence[int], traceparent: str) -> int:
        job = self._job
        session_id = self._peer.attach(self)
        self._peer.link.send(
            TargetOpen(
                session_id=session_id,
                token_ids=tuple(committed),
                prompt_length=len(job.prompt),
                sampling=job.sampling,
                noise=job.noise,
                acceptance=job.acceptance,
                time_left_ms=job.time_left_ms,
                traceparent=traceparent,
                max_length=job.max_length,
                end_token_ids=tuple(sorted(job.eos_token_ids)),
            ),
            urgent=False,
        )
        return session_id

    async def _verdict(self, round_: Round) -> Verdict:
        """Wait for the answer; a target whose whole link is silent for too long is dead."""
        assert self._answer is not None
        self._watch(round_)
        try:
            return await self._answer
        finally:
            if self._watcher is not None:
                self._watcher.cancel()
                self._watcher = None

    def _watch(self, round_: Round) -> None:
        """Look again and again, until the round is answered, whether anything came over the link."""
        timeout = self._peer.round_timeout_s
        if self._watcher is not None and self._peer.link.silent_s >= timeout:
            self._peer.link.drop(self._silent(round_))
        else:
            self._watcher = asyncio.get_running_loop().call_later(timeout, self._watch, round_)

    def _silent(self, round_: Round) -> PeerUnavailable:
        link = self._peer.link
        return PeerUnavailable(
            f"{link.name} at {link.address} sent nothing for {self._peer.round_timeout_s:g} s "
            f"(session {round_.session_id}, base length {round_.base_length})",
            metadata={"peer": link.name, "address": link.address},
        )

    async def _until_reachable(self, error: PacelineError, deadline: float) -> None:
        remaining = deadline - time.monotonic()
        if isinstance(error, Overloaded):
            await asyncio.sleep(min(remaining, (error.retry_after_ms or 100) / 1e3))
        await self._peer.link.wait_up(max(0.0, remaining))

    def _fail(self, error: PacelineError) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
            # Retrieved here so that a session closed before its answer is read stays quiet.
            self._answer.exception()
