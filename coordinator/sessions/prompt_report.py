"""The prompt's log-probabilities on their way from target to client: each one once, even if targets are lost."""

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
