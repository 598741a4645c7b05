"""Drafts for a server that is not Paceline's. It asks once behind each of its steps, and never waits for long.

An event loop in a thread of its own holds the links and sessions. The server's thread looks up what has come for the
outcomes of its step and leaves the rest to that loop. A draft that is dead, slow or wrong costs proposals alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pydantic import Field

from paceline.drafting.draft_pool import DraftPeer, DraftPool
from paceline.drafting.served_request import GreedyRequest, RoundEnd, ServedRequest
from paceline.protocol.draft import DraftBudget
from paceline.protocol.handshake import Fingerprint, Hello
from paceline.protocol.proposal import Outcome
from paceline.protocol.records import RoundRecord, StepTimings
from paceline.rpc.peer_link import DraftLink
from paceline.runtime import clock
from paceline.runtime.config import DRAFT_PORT, LOCALHOST, PeerSettings, PoolSettings
from paceline.runtime.settings import Settings

logger = logging.getLogger(__name__)

SWITCH_S = 0.5e-3
"""Longest that the client's thread keeps Python's lock from the server's; Python's own default is 5 ms."""
LOOK_S = 0.5
"""Seconds between two looks whether the server has gone idle."""
CLOSE_S = 2.0
"""Longest that `close` waits for the thread."""


class DraftClientSettings(Settings):
    """Where a server's drafts come from, and what they may cost it."""

    draft: PoolSettings = Field(
        PoolSettings(address=(f"{LOCALHOST}:{DRAFT_PORT}",)), description="HOST:PORT of draft services; repeatable."
    )
    drafter: str = Field("", description="Of the draft service; empty: its default.")
    fan_out: int = Field(4, ge=1, le=64, description="Next tokens per accepted node to draft for during a step.")
    answer_ms: float = Field(0.3, ge=0, le=1_000, description="Longest that a step waits for drafts on their way.")
    idle_s: float = Field(5.0, gt=0, description="A server that takes no step for so long keeps no draft session.")


class OfferJudge(Protocol):
    """Says whether drafts are worth their price, by what the server's steps commit with them and without."""

    def may_offer(self, rows: int) -> bool:
        """Whether steps of so many requests may have drafts now."""

    def learn(self, rows: int, tokens: int, step_ms: float, *, has_drafts: bool) -> None:
        """Learn from a step of `rows` requests that committed `tokens`; `has_drafts`: whether it might have some."""


@dataclass
class ClientCounts:
    """What a client has done: rounds that committed tokens, those with a proposal, and tokens."""

    rounds: int = 0
    hits: int = 0
    proposed: int = 0
    accepted: int = 0


class DraftClient:
    """Sessions at draft services for the requests of one server. All methods are the server's thread's.

    Args:
        settings: where drafts come from.
        vocabulary: fingerprint and size of the server's tokenizer; the size bounds proposed ids.
        most_tokens: of a proposal, from its root to a leaf.
        most_nodes: of a tree; 0: chains alone.
        max_length: longest request, tokens.
        judge: whether to offer.
    """

    def __init__(
        self,
        settings: DraftClientSettings,
        vocabulary: Fingerprint,
        *,
        most_tokens: int,
        most_nodes: int = 0,
        max_length: int,
        judge: OfferJudge,
    ) -> None:
        hello = Hello(secrets.token_hex(8), vocabulary)
        shared = settings.draft.model_dump(exclude={"address"})
        links = [DraftLink(PeerSettings(address=each, **shared), hello) for each in settings.draft.address]
        self._pool = DraftPool(map(DraftPeer, links), timeout_s=1.0, vocab_size=vocabulary.vocab_size)
        self._settings = settings
        self._budget = DraftBudget(most_tokens, max_nodes=most_nodes, fan_out=settings.fan_out)
        self._max_length = max_length
        self._judge = judge
        self.counts = ClientCounts()
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="draft client", daemon=True)
        self._arrival = threading.Condition()
        self._is_waiting = False
        self._requests: set[ServedRequest] = set()
        """Those that may have a session; the loop's."""
        self._latest: set[ServedRequest] = set()
        """Those of the latest step, and when it came, for how long it waited, and whether it was offered drafts."""
        self._stepped_at = self._waited_s = 0.0
        self._busy_at = 0.0
        """When the server last took a step or a request."""
        self._has_drafts = False

    @property
    def sessions(self) -> int:
        """The number of open sessions at draft services."""
        return sum(peer.sessions for peer in self._pool.peers)

    @property
    def is_up(self) -> bool:
        """Whether any draft service is linked."""
        return self._pool.is_up

    def start(self) -> None:
        """Begin to link to the draft services."""
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        self._thread.start()

    def close(self) -> None:
        """End every session and link; waits a moment for the thread."""
        self._post(self._end.set)
        self._thread.join(CLOSE_S)

    def open(self, token_ids: Sequence[int], prompt_length: int) -> ServedRequest:
        """Draft for a request with these tokens, of which the first `prompt_length` are its prompt."""
        task = GreedyRequest(prompt_length, self._max_length)
        request = ServedRequest(self._pool, task, self._settings.drafter, self._budget, token_ids)
        request.session.on_prepared = self._wake
        request.drafts_ahead = self._judge.may_offer(len(self._latest) or 1)
        self._busy_at = clock.now()
        self._post(self._begin, request, request.drafts_ahead)
        return request

    def end(self, request: ServedRequest) -> None:
        """End a request's session."""
        self._post(self._finish, request)

    def step(self, committed: Sequence[tuple[ServedRequest, Sequence[int]]]) -> list[list[int]]:
        """What to verify in the next step: a list of token ids for each request, empty where nothing is offered.

        The parents of a tree's nodes are in the request's `proposal`.

        Args:
            committed: each request of the step that has just ended, with the tokens that it committed; none: the
                step computed a part of its prompt.
        """
        began_at = self._busy_at = clock.now()
        rows = len(committed)
        step_ms = (began_at - self._stepped_at) * 1e3
        self._learn(committed, step_ms)
        offers = bool(rows) and self._judge.may_offer(rows)
        rounds = [(request, tokens, *request.begin_round(tokens)) for request, tokens in committed if tokens]
        if offers:
            self._wait([(request, outcome) for request, _, outcome, _ in rounds], began_at)
        step_rows = rows + sum(len(each.proposal or ()) for each in self._latest)
        timings = StepTimings(service_ms=step_ms - self._waited_s * 1e3, rows=step_rows, sessions=rows)
        ends, answers = [], dict[ServedRequest, list[int]]()
        for request, tokens, outcome, is_ours in rounds:
            record = self._record(request, tokens, step_ms, timings) if request in self._latest else None
            request.proposal = request.propose(outcome) if offers else None
            request.drafts_ahead = offers
            end = RoundEnd(outcome, tuple(tokens), is_ours, request.proposal, offers, record, began_at)
            ends.append((request, end))
            answers[request] = [*request.proposal.token_ids] if request.proposal else []
        self._latest = {request for request, _ in committed}
        self._post(self._follow, ends)
        self._stepped_at, self._waited_s, self._has_drafts = began_at, clock.now() - began_at, offers
        return [answers.get(request, []) for request, _ in committed]

    def _learn(self, committed: Sequence[tuple[ServedRequest, Sequence[int]]], step_ms: float) -> None:
        """Learn from a step of the requests of the one before it: another one computed a prompt, or came late."""
        if committed and all(tokens and request in self._latest for request, tokens in committed):
            tokens = sum(len(tokens) for _, tokens in committed)
            self._judge.learn(len(committed), tokens, step_ms, has_drafts=self._has_drafts)

    def _record(
        self, request: ServedRequest, tokens: Sequence[int], step_ms: float, timings: StepTimings
    ) -> RoundRecord:
        """Where the time of a round went that began with the step before. `proposal` is still the one it verified."""
        proposal = request.proposal
        proposed, accepted = len(proposal or ()), len(tokens) - 1
        counts = self.counts
        counts.rounds, counts.hits = counts.rounds + 1, counts.hits + (proposed > 0)
        counts.proposed, counts.accepted = counts.proposed + proposed, counts.accepted + accepted
        return RoundRecord(
            base_length=request.length - len(tokens) - 1,
            round_ms=step_ms,
            draft_wait_ms=self._waited_s * 1e3,
            wire_ms=0.0,
            target=timings,
            accept_ms=0.0,
            proposed=proposed,
            accepted=accepted,
            cache_hit=proposed > 0,
            cache_miss=self._has_drafts and not proposed,
            drafter=proposal.drafter if proposal else "",
            mode="drafts" if self._has_drafts else "rest",
        )

    def _wait(self, rounds: Sequence[tuple[ServedRequest, Outcome]], began_at: float) -> None:
        """Wait until something has come for each round whose draft is at work, at most `answer_ms`."""
        deadline = began_at + self._settings.answer_ms / 1e3
        with self._arrival:
            self._is_waiting = True
            while any(request.is_due(outcome) for request, outcome in rounds):
                if (left_s := deadline - clock.now()) <= 0 or not self._arrival.wait(left_s):
                    break
            self._is_waiting = False

    def _wake(self) -> None:
        if self._is_waiting:
            with self._arrival:
                self._arrival.notify_all()

    def _post(self, call: Callable[..., None], *values: object) -> None:
        """Leave a call to the loop; without one there are no drafts."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call, *values)

    def _begin(self, request: ServedRequest, offers: bool) -> None:
        self._requests.add(request)
        if offers:
            request.open()

    def _follow(self, ends: Sequence[tuple[ServedRequest, RoundEnd]]) -> None:
        for request, end in ends:
            try:
                request.follow(end)
            except Exception:
                logger.exception("following a request failed, its draft session ends")
                request.pause()

    def _finish(self, request: ServedRequest) -> None:
        self._requests.discard(request)
        request.end()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        links = [peer.link for peer in self._pool.peers]
        try:
            for link in links:
                await link.start()
            while not self._end.is_set():
                self._pause_if_idle()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._end.wait()
        finally:
            for request in [*self._requests]:
                self._finish(request)
            await asyncio.gather(*(link.close() for link in links))

    def _pause_if_idle(self) -> None:
        """End all sessions of a server that takes no more steps: it doesn't say when a request has ended."""
        if clock.now() - self._busy_at > self._settings.idle_s:
            for request in self._requests:
                request.pause()
