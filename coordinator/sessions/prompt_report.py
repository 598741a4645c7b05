"""The prompt's log-probabilities on their way from target to client: every one once, whatever target is lost."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Protocol

from coordinator.sessions.answers import check_piece
from paceline.protocol.errors import PacelineError, ProtocolMismatch
from paceline.protocol.generation import PromptLogprobs
from paceline.protocol.handshake import Welcome
from paceline.protocol.target import PromptPiece, TargetOpen


class ReportReader(Protocol):
    """Who gets them."""

    def put_prompt(self, rows: PromptLogprobs) -> None:
        """Take the next ones; never blocks."""

    @property
    def is_full(self) -> bool:
        """Whether so much is unread that no more should come."""

    def wait_for_reader(self) -> Awaitable[None]:
        """Return when everything is read."""


class NobodyReads(PacelineError):
    """The client has left too much unread: the session ends, and is opened anew behind what is known by then."""


class PromptReport:
    """What is known of the prompt, and what a target is asked for.

    Args:
        prompt: its token ids; of the first one nothing is to be known.
        alternatives: how many the client wants of each token; None: no report.
    """

    def __init__(self, prompt: Sequence[int], alternatives: int | None) -> None:
        self._prompt = prompt
        self._alternatives = alternatives
        self._wanted = 0 if alternatives is None else len(prompt) - 1
        self._known = 0
        self.reader: ReportReader | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all that the client wants has come: a session's first verdict comes behind it."""
        return self._known == self._wanted

    def fits(self, welcome: Welcome | None) -> bool:
        """Whether a target knows what it would be asked for."""
        return self.is_whole or (welcome is not None and welcome.reports_prompts)

    def asked(self, opening: TargetOpen) -> TargetOpen:
        """What a session is opened with that reports what isn't known yet."""
        if self.is_whole:
            return opening
        return replace(opening, prompt_logprobs=self._alternatives, prompt_logprobs_known=self._known)

    def take(self, piece: PromptPiece, vocab_size: int) -> None:
        """Pass a piece on.

        Raises:
            ProtocolMismatch: the piece isn't the next one, or is none of this prompt.
            NobodyReads: too much of it is unread.
        """
        last = piece.first_position + len(piece.rows) - 1
        if piece.first_position != self._known + 1 or last > self._wanted:
            raise ProtocolMismatch(
                f"session {piece.session_id}: the target sent log-probabilities of prompt tokens "
                f"{piece.first_position} to {last}, expected those from {self._known + 1} on, up to {self._wanted}"
            )
        check_piece(piece, self._prompt, vocab_size, self._alternatives or 0)
        assert self.reader is not None, "who asks for a report reads it"
        self._known = last
        self.reader.put_prompt(PromptLogprobs(piece.first_position, piece.rows))
        if self.reader.is_full:
            raise NobodyReads("too much of the prompt's report is unread")

    def check_whole(self, session_id: int) -> None:
        """Raise `ProtocolMismatch` for a target that has sent a verdict before all that was asked for."""
        if self.is_whole:
            return
        raise ProtocolMismatch(
            f"session {session_id}: the target sent a verdict behind log-probabilities of {self._known} of the "
            f"prompt's {self._wanted} tokens, expected all of them first"
        )

    async def read(self) -> None:
        """Return when the client has read all that came: opened anew for less, the session would soon end again."""
        assert self.reader is not None, "who asks for a report reads it"
        await self.reader.wait_for_reader()
