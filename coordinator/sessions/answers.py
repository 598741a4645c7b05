"""What a target answers for a session: checked, watched for, and at last given up.

A target writes the text, so nothing can tell whether it drew honestly. An answer that no honest target could send
ends the request with an error that names the field.

The prompt's log-probabilities on their way from target to client: each one once, even if targets are lost.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from paceline.protocol.errors import PacelineError, PeerUnavailable, ProtocolMismatch
from paceline.protocol.generation import PromptLogprobs
from paceline.protocol.handshake import Welcome
from paceline.protocol.target import PromptPiece, Round, TargetCommand, TargetEvent, TargetOpen, Verdict
from paceline.rpc.peer_link import PeerLink
from paceline.runtime import clock


def check_verdict(verdict: Verdict, vocab_size: int, logprobs: int | None) -> None:
    """Check a verdict's token ids against the vocabulary, and its rows of log-probabilities.

    There must be as many rows as were asked for, and each must have the drawn token. The number of tokens and
    probabilities is checked by the acceptance rule, which knows the proposal.

    Args:
        verdict: the target's.
        vocab_size: of the served model.
        logprobs: as `SamplingParams.logprobs`.

    Raises:
        ProtocolMismatch: naming field, value and limit.
    """
    _check_ids("verdict token_ids", verdict.token_ids, vocab_size)
    rows = 0 if logprobs is None else len(verdict.token_ids)
    _expect(len(verdict.logprobs) == rows, "verdict logprobs", len(verdict.logprobs), f"{rows} rows")
    for row, token_id in zip(verdict.logprobs, verdict.token_ids, strict=False):
        _check_ids("verdict logprobs", row.token_ids, vocab_size)
        _expect(len(set(row.token_ids)) == len(row.token_ids), "verdict logprobs", row.token_ids, "each id once")
        _expect(token_id in row.token_ids, "verdict logprobs", row.token_ids, f"with the drawn token, {token_id}")


def check_piece(piece: PromptPiece, prompt: Sequence[int], vocab_size: int, alternatives: int) -> None:
    """Check that rows of a prompt's log-probabilities are of its tokens, and their ids in the vocabulary.

    Args:
        piece: the target's; its positions are the prompt's.
        prompt: its token ids.
        vocab_size: of the served model.
        alternatives: how many of the most probable tokens were asked for.

    Raises:
        ProtocolMismatch: naming field, value and limit.
    """
    for position, row in enumerate(piece.rows, start=piece.first_position):
        ids = row.token_ids
        _check_ids("prompt logprobs", ids, vocab_size)
        _expect(ids[:1] == (prompt[position],), "prompt logprobs", ids, f"of the prompt's token {prompt[position]}")
        _expect(len(ids) <= alternatives + 1, "prompt logprobs ids", len(ids), f"at most {alternatives + 1}")


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token_id in ids:
        _expect(token_id < vocab_size, name, token_id, f"below {vocab_size}, the vocabulary")


def _expect(holds: bool, name: str, value: object, limit: str) -> None:
    if not holds:
        facts = {"field": name, "value": str(value), "limit": limit}
        raise ProtocolMismatch(f"the target sent {name} = {value}: must be {limit}", metadata=facts)


TargetLinkLike = PeerLink[TargetCommand, TargetEvent]


class AnswerWatch:
    """Gives a round up when its target has sent nothing for the session for `timeout_s`.

    A busy target (a full queue, a long prompt, a long step) names the session in each of its signs of life, however
    long that lasts. A target that hangs, has lost the round or withholds the verdict does not. Where the whole link
    is silent, the target is dead and the link is dropped. Otherwise only this session is lost.

    Args:
        timeout_s: longest silence about a session, seconds.
        on_lost: called with an error when the session is lost and the link is not.
    """

    def __init__(self, timeout_s: float, on_lost: Callable[[PeerUnavailable], None]) -> None:
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._began_at = self._heard_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, link: TargetLinkLike, round_: Round) -> None:
        """Watch a round until `end`."""
        self._began_at = self._heard_at = clock.now()
        self._look_in(self._timeout_s, link, round_)

    def note_sign(self) -> None:
        """Note that the target sent something for the session, or named it in a sign of life."""
        self._heard_at = clock.now()

    def take_worked_s(self) -> float:
        """Seconds up to the latest sign in which the target worked on the round. A second call counts from there."""
        worked_s, self._began_at = self._heard_at - self._began_at, self._heard_at
        return worked_s

    def end(self) -> None:
        """Stop watching: the round is answered, or nobody waits for it any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_in(self, pause_s: float, link: TargetLinkLike, round_: Round) -> None:
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._look, link, round_)

    def _look(self, link: TargetLinkLike, round_: Round) -> None:
        left_s = self._timeout_s - self._silence_s(link)
        if left_s > 0:
            self._look_in(left_s, link, round_)
        elif link.silent_s >= self._timeout_s:
            link.drop(self._error("sent nothing", link, round_))
        else:
            self._on_lost(self._error("is not at work on the session and sent nothing for it", link, round_))

    def _silence_s(self, link: TargetLinkLike) -> float:
        return clock.now() - self._heard_at

    def _error(self, what: str, link: TargetLinkLike, round_: Round) -> PeerUnavailable:
        waited_s = clock.now() - self._began_at
        return PeerUnavailable(
            f"{link.name} at {link.address} {what} for {self._timeout_s:g} s (session {round_.session_id}, "
            f"base length {round_.base_length}, unanswered for {waited_s:.1f} s)",
            metadata={
                "peer": link.name,
                "address": link.address,
                "session": str(round_.session_id),
                "base_length": str(round_.base_length),
                "unanswered_s": f"{waited_s:.1f}",
            },
        )


MAX_SPARED = 4
"""Most losses of one round for which the time that its target worked is not counted. With more of them, the round is
what its targets die of."""


class LossPatience:
    """One round's patience: `wait_s` from its first loss, without the time in which a target worked on its session.

    A session that waits at its second target, in a queue or for a prefix, has a target meanwhile. If that one dies,
    too, the time since the first died does not end the session.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._deadline = math.inf
        self._behind_work = 0

    @property
    def left_s(self) -> float:
        """Seconds until the round is given up; infinite before the first loss."""
        return self._deadline - clock.now()

    def note_loss(self, worked_s: float) -> None:
        """Count the loss of a target that worked on the session for `worked_s`."""
        self._behind_work += worked_s > 0
        spared_s = worked_s if self._behind_work <= MAX_SPARED else 0.0
        self._deadline = min(self._deadline + spared_s, clock.now() + self._wait_s)


class ReportReader(Protocol):
    """The reader of the report: the client's outbox."""

    def put_prompt(self, rows: PromptLogprobs) -> None:
        """Take the next rows; never blocks."""

    @property
    def is_full(self) -> bool:
        """Whether so much is unread that no more should come."""

    def wait_for_reader(self) -> Awaitable[None]:
        """Return when everything is read."""


class ReaderTooSlow(PacelineError):
    """The client has left too much unread. The session ends, and is opened again for the rest of the report."""


class PromptReport:
    """How much of the prompt's log-probabilities has come, and how much is still to be asked for.

    Args:
        prompt: its token ids; the first one has no log-probability.
        alternatives: how many alternatives the client wants for each token; None: no report.
    """

    def __init__(self, prompt: Sequence[int], alternatives: int | None) -> None:
        self._prompt = prompt
        self._alternatives = alternatives
        self._total = 0 if alternatives is None else len(prompt) - 1
        self._count = 0
        self.reader: ReportReader | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the whole report has come; a session's first verdict comes after it."""
        return self._count == self._total

    def fits(self, welcome: Welcome | None) -> bool:
        """Whether a target can send what is missing of the report."""
        return self.is_whole or (welcome is not None and welcome.reports_prompts)

    def extend(self, opening: TargetOpen) -> TargetOpen:
        """Extend a session's opening by the request for what is missing of the report."""
        if self.is_whole:
            return opening
        return replace(opening, prompt_logprobs=self._alternatives, prompt_logprobs_known=self._count)

    def take(self, piece: PromptPiece, vocab_size: int) -> None:
        """Pass a piece on to the reader.

        Raises:
            ProtocolMismatch: the piece isn't the next one, or is not of this prompt.
            ReaderTooSlow: too much of the report is unread.
        """
        last = piece.first_position + len(piece.rows) - 1
        if piece.first_position != self._count + 1 or last > self._total:
            raise ProtocolMismatch(
                f"session {piece.session_id}: the target sent log-probabilities of prompt tokens "
                f"{piece.first_position} to {last}, expected those from {self._count + 1} on, up to {self._total}"
            )
        check_piece(piece, self._prompt, vocab_size, self._alternatives or 0)
        assert self.reader is not None, "who asks for a report reads it"
        self._count = last
        self.reader.put_prompt(PromptLogprobs(piece.first_position, piece.rows))
        if self.reader.is_full:
            raise ReaderTooSlow("too much of the prompt's report is unread")

    def check_whole(self, session_id: int) -> None:
        """Check that the whole report has come.

        Raises:
            ProtocolMismatch: the target sent a verdict before the end of the report.
        """
        if self.is_whole:
            return
        raise ProtocolMismatch(
            f"session {session_id}: the target sent a verdict after log-probabilities of {self._count} of the "
            f"prompt's {self._total} tokens, expected all of them first"
        )

    async def read(self) -> None:
        """Return when the client has read everything. A session that is opened before would soon end again."""
        assert self.reader is not None, "who asks for a report reads it"
        await self.reader.wait_for_reader()
