"""Lets requests in by their key, and has a key's requests end when it is revoked."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from paceline.access.keys import ApiKey, hash_of, parse_keys, read_key_file, tenant_of
from paceline.access.limits import Clock, Meter
from paceline.protocol.errors import PacelineError, Unauthenticated
from paceline.runtime import metrics

logger = logging.getLogger(__name__)

REREAD_S = 0.5
"""How often the key file is read: a revoked key is refused within a second."""
REFUSED = "authorization: must be 'Bearer KEY', with a key of this coordinator"
"""The same for a missing and a wrong key: nobody learns which keys there are."""
REVOKED = "the API key was revoked while the request ran; the text so far is valid"


class Caller:
    """Who sends a request, and what it may use; this base class is anybody, without limits."""

    tenant = ""
    """Whose sessions the request opens; empty: nobody's in particular."""

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count one request while it runs.

        Raises:
            Overloaded: naming the limit of the key that is reached, and when to try again.
        """
        yield

    def take_prompt(self, tokens: int) -> None:
        """Charge the tokens that a request brings. Raises as `request`."""

    def take_generated(self, tokens: int) -> None:
        """Charge tokens that were generated."""

    async def until_revoked(self) -> NoReturn:
        """Wait for the end of the key's time.

        Raises:
            Unauthenticated: the key was revoked.
        """
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")


class Gate:
    """Says who sends a request; this base class lets anybody in."""

    def authenticate(self, authorization: str) -> Caller:
        """The caller by the value of the `authorization` header or metadata; empty: there is none.

        Raises:
            Unauthenticated: no key, or none of ours; one message for both.
        """
        return Caller()

    async def watch(self) -> None:
        """Keep up with the keys until cancelled."""
        await asyncio.Event().wait()


class KeyGate(Gate):
    """Lets in who has a key of a file, which is read again and again.

    A key is known by its hash. What it has used outlives changes of its name and limits. A file that can't be read
    or is not valid is logged and changes nothing.

    Raises:
        InvalidInput: the file can't be read, or is not valid.
    """

    def __init__(self, file: Path, clock: Clock = time.monotonic) -> None:
        self._file = file
        self._clock = clock
        self._content = b""
        self._holders: dict[str, _Holder] = {}
        self._fault = ""
        self._apply(read_key_file(file))

    def authenticate(self, authorization: str) -> Caller:  # noqa: D102
        scheme, _, presented = authorization.partition(" ")
        wanted, found = hash_of(presented), None
        # Every key is compared, each in constant time: how long it takes tells nothing of any hash.
        for holder in self._holders.values():
            if hmac.compare_digest(holder.key.sha256, wanted):
                found = holder
        if found is None or scheme.lower() != "bearer":
            raise Unauthenticated(REFUSED)
        return found

    async def watch(self) -> None:  # noqa: D102
        while True:
            await asyncio.sleep(REREAD_S)
            try:
                content = await asyncio.to_thread(read_key_file, self._file)
                if content != self._content:
                    self._apply(content)
                self._fault = ""
            except PacelineError as error:
                metrics.reload_failed("api_keys")
                if error.message != self._fault:
                    logger.error("key file not read, the keys stay as they were: error=%s", error.message)
                self._fault = error.message

    def _apply(self, content: bytes) -> None:
        keys = {key.sha256: key for key in parse_keys(content, self._file).keys}
        for holder in self._holders.values():
            if holder.key.sha256 not in keys:
                holder.revoked.set()
                logger.info("key revoked: name=%s", holder.key.name)
        self._holders = {
            each: self._holders[each].renewed(key) if each in self._holders else _Holder(key, self._clock)
            for each, key in keys.items()
        }
        self._content = content
        logger.info("key file read: file=%s keys=%d", self._file, len(keys))


class _Holder(Caller):
    """Who has one key."""

    def __init__(self, key: ApiKey, clock: Clock) -> None:
        self.key = key
        self.tenant = tenant_of(key)
        self.revoked = asyncio.Event()
        self._meter = Meter(key.limits, clock)

    def renewed(self, key: ApiKey) -> _Holder:
        """The same with what the file now says of the key."""
        self.key = key
        self.tenant = tenant_of(key)
        self._meter.limit(key.limits)
        return self

    @contextmanager
    def request(self) -> Iterator[None]:
        self._meter.begin()
        try:
            yield
        finally:
            self._meter.end()

    def take_prompt(self, tokens: int) -> None:
        self._meter.take_prompt(tokens)

    def take_generated(self, tokens: int) -> None:
        self._meter.take_generated(tokens)

    async def until_revoked(self) -> NoReturn:
        await self.revoked.wait()
        raise Unauthenticated(REVOKED)


def gate_of(file: Path | None) -> Gate:
    """The gate of a key file; without one anybody is let in. Raises as `KeyGate`."""
    return Gate() if file is None else KeyGate(file)
