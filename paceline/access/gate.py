"""Lets requests in by their key, and ends a key's requests when it is revoked."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from paceline.access.keys import ApiKey, hash_of, parse_keys, read_key_file, tenant_of
from paceline.access.limits import Clock, Meter
from paceline.protocol.errors import PacelineError, Unauthenticated
from paceline.runtime import metrics
from paceline.runtime.clock import now

logger = logging.getLogger(__name__)

REREAD_S = 0.5
"""How often the key file is read: a revoked key is refused within a second."""
REFUSAL = "authorization: must be 'Bearer KEY', with a key of this coordinator"
"""The same text for a missing and a wrong key, so that nobody learns which keys exist."""
REVOCATION = "the API key was revoked while the request ran; the text so far is valid"


class Caller:
    """The sender of a request, and its limits; this base class is anybody, without limits."""

    tenant = ""
    """The tenant of the request's sessions; empty: none."""

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count one request while it runs.

        Raises:
            Overloaded: the key has reached a limit, which the error names with the time of the next try.
        """
        yield

    def take_prompt(self, tokens: int) -> None:
        """Charge a prompt's tokens. Raises as `request`."""

    def take_generated(self, tokens: int) -> None:
        """Charge generated tokens."""

    async def until_revoked(self) -> NoReturn:
        """Wait until the key is revoked.

        Raises:
            Unauthenticated: the key was revoked.
        """
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")


class Gate:
    """Identifies the sender of a request; this base class lets anybody in."""

    def authenticate(self, authorization: str) -> Caller:
        """The caller from the value of the `authorization` header or metadata, which is empty if there is none.

        Raises:
            Unauthenticated: no key, or an unknown one; the message is the same.
        """
        return Caller()

    async def watch(self) -> None:
        """Follow changes of the keys until cancelled."""
        await asyncio.Event().wait()


class KeyGate(Gate):
    """Lets in callers with a key of a file, which is read twice a second.

    A key is identified by its hash. Its usage outlives changes of its name and limits. A file that can't be read or
    is not valid is logged and changes nothing.

    Raises:
        InvalidInput: the file can't be read, or is not valid.
    """

    def __init__(self, file: Path, clock: Clock = now) -> None:
        self._file = file
        self._clock = clock
        self._content = b""
        self._holders: dict[str, _KeyHolder] = {}
        self._fault = ""
        self._apply(read_key_file(file))

    def authenticate(self, authorization: str) -> Caller:  # noqa: D102
        scheme, _, key = authorization.partition(" ")
        digest, caller = hash_of(key), None
        # Every key is compared, each in constant time, so that the duration reveals no hash.
        for holder in self._holders.values():
            if hmac.compare_digest(holder.key.sha256, digest):
                caller = holder
        if caller is None or scheme.lower() != "bearer":
            raise Unauthenticated(REFUSAL)
        return caller

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
                holder.revocation.set()
                logger.info("key revoked: name=%s", holder.key.name)
        self._holders = {
            each: self._holders[each].renew(key) if each in self._holders else _KeyHolder(key, self._clock)
            for each, key in keys.items()
        }
        self._content = content
        logger.info("key file read: file=%s keys=%d", self._file, len(keys))


class _KeyHolder(Caller):
    """The caller with one key."""

    def __init__(self, key: ApiKey, clock: Clock) -> None:
        self.key = key
        self.tenant = tenant_of(key)
        self.revocation = asyncio.Event()
        self._meter = Meter(key.limits, clock)

    def renew(self, key: ApiKey) -> _KeyHolder:
        """Take over the key's new entry of the file."""
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
        await self.revocation.wait()
        raise Unauthenticated(REVOCATION)


def gate_of(file: Path | None) -> Gate:
    """The gate of a key file; without a file, one that lets anybody in. Raises as `KeyGate`."""
    return Gate() if file is None else KeyGate(file)
