"""Teacher-forced passes by running services, in what their links carry for any request. Exact, or an error.

A round verifies a proposal, whatever it is worth: a stretch of a text is proposed behind what stands before it, and
the verdict has the target's own draw before each of its tokens. A draft says how committed tokens stand in its order
(`Shadow`); where the target draws another token than the text's, a proposal has the draft's first choices in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from types import TracebackType
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from coordinator.sessions.target_pool import TargetPeer
from paceline.drafting.draft_pool import DraftPeer
from paceline.protocol.codec import error_of
from paceline.protocol.draft import Commit, DraftBudget, DraftCommand, DraftedProposal, DraftEvent, DraftOpen, Shadow
from paceline.protocol.errors import PacelineError, PeerUnavailable, ProtocolMismatch, require
from paceline.protocol.handshake import Welcome
from paceline.protocol.proposal import ROOT, Acceptance, Outcome, Proposal
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.protocol.session import Failure, SessionSpec
from paceline.protocol.target import Round, RowLogprobs, TargetCommand, TargetEvent, TargetOpen, Verdict
from paceline.rpc.peer_pool import Command, Event, Peer
from paceline_lab.predict.figures import RANKS
from paceline_lab.predict.passes import SampleText
from paceline_lab.predict.positions import ABSENT, ENDLESS, DrafterPositions, TargetPositions
from paceline_training.corpus import TokenIds

PATIENCE_S = 120.0
"""Longest wait for one answer of a service: a long prompt's prefix is computed in it."""
SHADOW = DraftBudget(shadow=True)
CHOICES = DraftBudget(max_tokens=1, tree_widths=(RANKS,), shadow=True)
"""The first choices behind what is committed, besides its shadow."""


class Exchange(Generic[Command, Event]):
    """One session on a link, whose events come one by one; a context manager, which closes it."""

    def __init__(self, peer: Peer[Command, Event]) -> None:
        self._peer = peer
        self._events: asyncio.Queue[Event | PacelineError] = asyncio.Queue()
        self.id = peer.attach(self)

    def __enter__(self) -> Exchange[Command, Event]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        self._peer.detach(self.id)

    def send(self, command: Command) -> None:
        """Queue a command; raises `PeerUnavailable` when the link is down."""
        self._peer.link.send(command)

    async def next(self) -> Event:
        """Wait for the next event.

        Raises:
            PacelineError: the session's failure, a link that broke, or a service that does not answer.
        """
        try:
            async with asyncio.timeout(PATIENCE_S):
                event = await self._events.get()
        except TimeoutError as error:
            where = f"{self._peer.link.name} at {self._peer.link.address}"
            raise PeerUnavailable(f"{where} did not say how a text stands within {PATIENCE_S:g} s") from error
        if isinstance(event, Failure):
            raise error_of(event)
        if isinstance(event, PacelineError):
            raise event
        return event

    def on_event(self, event: Event) -> None:
        """Take an event in, as `PeerSession` does."""
        self._events.put_nowait(event)

    def on_lost(self, error: PacelineError) -> None:
        """Take the link's error in, as `PeerSession` does."""
        self._events.put_nowait(error)


TargetExchange = Exchange[TargetCommand, TargetEvent]
DraftExchange = Exchange[DraftCommand, DraftEvent]


async def answer(
    peer: TargetPeer, prompt: TokenIds, params: SamplingParams, noise: NoiseKey, longest: int, ends: frozenset[int]
) -> AsyncIterator[int]:
    """Yield the target's own text behind a prompt, up to `longest` tokens together; target-only, under leases."""
    spec = SessionSpec(prompt, len(prompt), params, noise, Acceptance.COUPLED, max_length=longest)
    length, last, due = len(prompt), prompt[-1], 0
    with TargetExchange(peer) as session:
        session.send(TargetOpen(session.id, spec))
        while length < longest:
            if not due:
                lease = min(_welcome(peer).max_lease, longest - length - 1)
                session.send(Round(session.id, length - 1, ROOT, (last,), lease=lease))
                due = lease + 1
            last = (await _verdict(session, 1)).token_ids[0]
            length, due = length + 1, due - 1
            yield last
            if last in ends:
                return


async def read_by_target(peer: TargetPeer, text: SampleText) -> TargetPositions:
    """Return a running target's positions in a text: its draws, and the most probable token at each place.

    Probabilities are known at temperatures 0 and 1, whose figures are at temperature 1; entropies are known nowhere.
    """
    places = text.answer_places
    stretches = _stretches(places, _welcome(peer).max_proposal_nodes)
    draws = [each for stretch in stretches for each in await _verify(peer, text, stretch)]
    text_tokens = text.row.token_ids[places].astype(np.int32)
    tokens = text_tokens.copy() if text.own else np.array([token for token, _ in draws], np.int32)
    rows = [dict(zip(row.token_ids, row.logprobs, strict=True)) for _, row in draws]
    tops = np.array([min(row, key=lambda token: (-row[token], token)) for row in rows], np.int32)
    absent = np.full(places.size, ABSENT)
    chances, top_chances = absent, absent
    if text.params.temperature in (0.0, 1.0):
        chances, top_chances = np.exp(_of_each(rows, tokens)), np.exp(_of_each(rows, tops))
    return TargetPositions(
        places=places.astype(np.int32),
        roles=text.row.roles[places],
        written=text_tokens,
        tokens=tokens,
        tops=tops,
        chances=chances,
        top_chances=top_chances,
        written_logprobs=_of_each(rows, text_tokens),
        entropies=absent,
    )


async def read_by_draft(peer: DraftPeer, drafter: str, text: SampleText, target: TargetPositions) -> DrafterPositions:
    """Return a running drafter's positions in a text: ranks of the target's draws, and confidence in first choices.

    Ranks are of the one draw that text and noise have, not averaged over noise as passes over distributions are.

    Raises:
        InvalidInput: the text is longer than the drafter's context.
    """
    most, length = _welcome(peer).max_length, text.row.token_ids.size
    require(length <= most, "text tokens", length, f"at most {most}, the context of drafter {drafter!r}")
    with DraftExchange(peer) as session:
        reading = _DraftReading(session, text, target)
        await reading.run(drafter)
    return reading.positions()


class _DraftReading:
    """One text on a draft's session: committed in stretches, each up to where the target draws another token."""

    def __init__(self, session: DraftExchange, text: SampleText, target: TargetPositions) -> None:
        self._session, self._text, self._target = session, text, target
        self._tokens: TokenIds = tuple(text.row.token_ids.tolist())
        self._standings: dict[int, tuple[int, float]] = {}
        self._choices: dict[int, Proposal] = {}

    async def run(self, drafter: str) -> None:
        """Ask for everything, and wait for it."""
        places = self._target.places.tolist()
        first, end = places[0], places[-1] + 1
        others = self._target.places[self._target.tokens != self._target.written].tolist()
        spec = _spec(self._text, first, self._text.params)
        budget = CHOICES if first in others else SHADOW
        self._session.send(DraftOpen(self._session.id, spec, drafter, budget, takes_shadows=True))
        at = first
        for stop in (*others, end):
            if stop > at:
                self._commit(at, stop, CHOICES if stop != end else SHADOW)
                at = stop
            while stop != end and stop not in self._choices:
                self._take(await self._session.next(), stop)
        while not self._standings.keys() >= set(places):
            self._take(await self._session.next(), end)

    def positions(self) -> DrafterPositions:
        """Return the positions, once everything has come."""
        count = self._target.places.size
        reach, ranks = np.zeros((count, 1, RANKS)), np.zeros(count, np.int32)
        choices, confidence, chances = np.full(count, -1, np.int32), np.zeros(count), np.full(count, ABSENT)
        for index, (place, token) in enumerate(zip(self._target.places, self._target.tokens, strict=True)):
            rank, confidence[index] = self._standings[int(place)]
            text_token = self._tokens[place]
            if rank == 1:
                choices[index] = text_token
            if token != text_token:
                proposal = self._choices[int(place)]
                rank = proposal.token_ids.index(token) + 1 if token in proposal.token_ids else 0
                choices[index] = proposal.token_ids[0]
                chances[index] = proposal.draft_probabilities[rank - 1] if rank else ABSENT
            elif rank == 1:
                chances[index] = confidence[index]
            ranks[index] = rank if rank <= RANKS else 0
            reach[index, 0, rank - 1 :] = 0 < rank <= RANKS
        endless, no_ids = np.full(count, ENDLESS, np.int32), np.full(count, -1, np.int32)
        absent = np.full(count, ABSENT)
        return DrafterPositions(reach, endless, ranks, choices, no_ids, confidence, chances, absent, absent, absent)

    def _commit(self, at: int, stop: int, budget: DraftBudget) -> None:
        tokens = self._tokens[at:stop]
        self._session.send(Commit(self._session.id, Outcome(at - 1, ROOT, tokens[-1]), tokens, at, budget))

    def _take(self, event: DraftEvent, stop: int) -> None:
        """Note an event of the draft; a proposal has its choices for `stop`."""
        if isinstance(event, Shadow):
            pairs = zip(event.ranks, event.probabilities, strict=True)
            self._standings |= dict(enumerate(pairs, start=event.first_position))
        elif isinstance(event, DraftedProposal):
            is_ranked = event.proposal.token_ids and set(event.proposal.parents) == {ROOT}
            if not is_ranked:
                raise ProtocolMismatch(f"choices of the draft before token {stop} = {event.proposal}: must be ranked")
            self._choices[stop] = event.proposal


async def _verify(peer: TargetPeer, text: SampleText, stretch: NDArray[np.intp]) -> list[tuple[int, RowLogprobs]]:
    """Return the target's draw at each place of a stretch, and log-probabilities there.

    Those are of the text's token, the draw and the most probable token.
    """
    first, end = int(stretch[0]), int(stretch[-1]) + 1
    proposed = tuple(text.row.token_ids[first:end].tolist())
    proposal = Proposal(1, proposed, (1.0,) * len(proposed))
    spec = _spec(text, first, SamplingParams(temperature=text.params.temperature, logprobs=1))
    with TargetExchange(peer) as session:
        session.send(TargetOpen(session.id, spec))
        session.send(Round(session.id, first - 1, ROOT, spec.token_ids[-1:], proposal))
        verdict = await _verdict(session, len(proposed) + 1)
    draws = list(zip(verdict.token_ids, verdict.logprobs, strict=False))
    complete = [
        {text_token, draw} <= set(row.token_ids) for text_token, (draw, row) in zip(proposed, draws, strict=False)
    ]
    if len(draws) <= len(proposed) or not all(complete):
        raise ProtocolMismatch(
            f"the verdict at token {first} lacks log-probabilities of its own tokens or the text's"
        )
    return [draws[place - first] for place in stretch.tolist()]


async def _verdict(session: TargetExchange, tokens: int) -> Verdict:
    while not isinstance(event := await session.next(), Verdict):
        pass  # it was opened
    if len(event.token_ids) != tokens:
        raise ProtocolMismatch(f"verdict token_ids = {len(event.token_ids)}: must be {tokens}")
    return event


def _spec(text: SampleText, length: int, params: SamplingParams) -> SessionSpec:
    """Return a session behind the first `length` tokens of a text; tokens before its first position are prompt."""
    prefix = tuple(text.row.token_ids[:length].tolist())
    prompt = int(text.answer_places[0])
    longest = text.row.token_ids.size
    return SessionSpec(prefix, prompt, params, text.noise, Acceptance.COUPLED, max_length=longest)


def _stretches(places: NDArray[np.intp], most: int) -> Iterator[NDArray[np.intp]]:
    """Split places into stretches of at most `most` tokens."""
    at = 0
    while at < places.size:
        end = int(np.searchsorted(places, places[at] + most))
        yield places[at:end]
        at = end


def _of_each(rows: Sequence[dict[int, float]], tokens: NDArray[np.int32]) -> NDArray[np.float64]:
    return np.array([row[token] for row, token in zip(rows, tokens.tolist(), strict=True)], np.float64)


def _welcome(peer: TargetPeer | DraftPeer) -> Welcome:
    assert peer.link.welcome is not None, "the link stood before anything was sent"
    return peer.link.welcome
