"""Prefixes in computation: a session that shares one waits for it instead of computing it itself. Pure."""

from __future__ import annotations

from target_service.session import Session


class PendingPrefixes:
    """Blocks by key, and the opening session that computes each.

    Invariant: only admitted sessions claim blocks, and they compute them or
    end, so no session waits for ever.
    """

    def __init__(self) -> None:
        self._claims: dict[bytes, int] = {}

    def holds(self, session: Session) -> bool:
        """Whether another session computes a block that this one needs."""
        if session.awaits not in self._claims:
            usable = session.reusable(session.prefill_length)
            digests = (key.digest for key in reversed(session.keys) if key.end <= usable)
            session.awaits = next((digest for digest in digests if digest in self._claims), None)
        return session.awaits is not None

    def claim(self, session: Session) -> None:
        """Claim the blocks that no other session computes for a session that is admitted."""
        for key in session.keys:
            self._claims.setdefault(key.digest, session.key)

    def release(self, session: Session, rows: int) -> None:
        """Release the sessions that wait for the first `rows` rows of a session's prefix, which are computed."""
        self._drop(session, rows)

    def end(self, session: Session) -> None:
        """Release all that wait for the session."""
        self._drop(session, session.prefill_length)

    def _drop(self, session: Session, rows: int) -> None:
        while session.released_blocks < len(session.keys) and session.keys[session.released_blocks].end <= rows:
            digest = session.keys[session.released_blocks].digest
            if self._claims.get(digest) == session.key:
                del self._claims[digest]
            session.released_blocks += 1
