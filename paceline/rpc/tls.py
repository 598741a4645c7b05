"""TLS files: checked before gRPC sees them, whose own refusals name no file, and read again when they change.

Fields are named as a configuration does: `server.tls_key`, `target.tls_ca`.
"""

from __future__ import annotations

import hashlib
import logging
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import grpc

from paceline.protocol.errors import InvalidInput
from paceline.runtime import metrics
from paceline.runtime.config import PeerSettings, ServerSettings
from paceline.runtime.live_files import read_live

logger = logging.getLogger(__name__)

WRONG_KEY = ("KEY_VALUES_MISMATCH", "NO_CERTIFICATE_ASSIGNED")
"""What OpenSSL calls the key of another certificate: of the same kind of key, and of another kind."""
MAX_SECTIONS = 64
"""Sets of a client's files that are kept in mind."""


@dataclass(frozen=True)
class TlsMaterial:
    """What the files of a section hold, PEM: a certificate with its key, and the authorities to trust."""

    pair: tuple[bytes, bytes] | None
    authority: bytes | None

    @property
    def digest(self) -> str:
        """Tells certificates apart in a log: the first digits of the file's SHA-256."""
        return "none" if self.pair is None else hashlib.sha256(self.pair[0]).hexdigest()[:16]


@dataclass(frozen=True)
class TlsPaths:
    """Where a section's files are; `section` and `authority_field` are what the configuration calls them."""

    section: str
    authority_field: str
    certificate: Path | None
    key: Path | None
    authority: Path | None

    def read(self) -> TlsMaterial:
        """Read and check them.

        Raises:
            InvalidInput: a file is missing, unreadable, or not what it should be, or one is set without the other.
        """
        pair = _read_pair(self.section, self.certificate, self.key)
        field = f"{self.section}{self.authority_field}"
        return TlsMaterial(pair, None if self.authority is None else _read_certificate(field, self.authority))

    def state(self) -> tuple[tuple[int, ...], ...]:
        """What changes when a file does; also when a link to it is set to another file."""
        return tuple(_states((self.certificate, self.key, self.authority)))


class TlsFiles:
    """The files of a section, as they were when they last were right. For several threads."""

    def __init__(self, paths: TlsPaths) -> None:
        self._paths = paths
        self._lock = threading.Lock()
        self._state: tuple[tuple[int, ...], ...] = ()
        self._material: TlsMaterial | None = None
        self._outdated = False

    def read(self) -> TlsMaterial:
        """What to use for a new connection.

        Files that have changed and are not right, for example a certificate whose key is not written
        yet, leave what was read before in force; that is logged once for each change, and counted at each connection.

        Raises:
            InvalidInput: they have not been right yet.
        """
        with self._lock:
            state = self._paths.state()
            if self._material is None:
                self._material = self._paths.read()
            elif state != self._state:
                self._material = self._read_again(self._material)
            self._state = state
            if self._outdated:
                metrics.reload_failed("tls")
            return self._material

    def _read_again(self, before: TlsMaterial) -> TlsMaterial:
        section = self._paths.section.rstrip(".") or "client"
        try:
            material = self._paths.read()
        except InvalidInput as error:
            logger.warning("TLS files are not right, the last ones stay: section=%s error=%s", section, error.message)
            self._outdated = True
            return before
        self._outdated = False
        if material == before:
            return before
        logger.info("TLS files read again: section=%s certificate=%s", section, material.digest)
        return material


def server_files(settings: ServerSettings) -> TlsFiles:
    """The files that a server serves with."""
    return TlsFiles(
        TlsPaths("server.", "tls_client_ca", settings.tls_certificate, settings.tls_key, settings.tls_client_ca)
    )


def server_credentials(settings: ServerSettings) -> grpc.ServerCredentials | None:
    """What to serve with: each handshake has the files of its moment; None: plaintext.

    Raises:
        InvalidInput: a file is missing, or not what it should be.
    """
    files = server_files(settings)
    told = files.read()
    if told.pair is None:
        if told.authority is not None:
            limit = "set together with server.tls_certificate and server.tls_key"
            raise InvalidInput.of("server.tls_client_ca", str(settings.tls_client_ca), limit)
        return None

    def changed() -> grpc.ServerCertificateConfiguration | None:
        """Called on gRPC's threads before each handshake; None: as before."""
        nonlocal told
        material = files.read()
        if material is told:
            return None
        told = material
        return _configuration(material)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(told),
        changed,  # type: ignore[arg-type]  # the stub forgets that None is allowed
        require_client_authentication=told.authority is not None,
    )


def channel_credentials(settings: PeerSettings, section: str) -> grpc.ChannelCredentials | None:
    """What to connect with, from the files as they are now; None: plaintext.

    Raises:
        InvalidInput: a file is missing, or not what it should be.
    """
    files = _client_files(TlsPaths(section, "tls_ca", settings.tls_certificate, settings.tls_key, settings.tls_ca))
    material = files.read()
    if material.authority is None:
        if material.pair is not None:
            name = f"{section}tls_certificate"
            raise InvalidInput.of(name, str(settings.tls_certificate), f"set together with {section}tls_ca")
        return None
    certificate, key = material.pair or (None, None)
    return grpc.ssl_channel_credentials(material.authority, private_key=key, certificate_chain=certificate)


@lru_cache(MAX_SECTIONS)
def _client_files(paths: TlsPaths) -> TlsFiles:
    """The same for all links of a section, from one connect to the next."""
    return TlsFiles(paths)


def _configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    assert material.pair is not None, "a TLS server has a certificate"
    certificate, key = material.pair
    return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=material.authority)


def _read_pair(section: str, certificate: Path | None, key: Path | None) -> tuple[bytes, bytes] | None:
    """A certificate and its private key, of the fields `tls_certificate` and `tls_key`; None if neither is set."""
    if certificate is None and key is None:
        return None
    names = f"{section}tls_certificate", f"{section}tls_key"
    if certificate is None or key is None:
        raise InvalidInput.of(", ".join(names), "one without the other", "set together")
    pair = _read_certificate(names[0], certificate), _read(names[1], key)
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        _context().load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        mismatch = f"the private key of {names[0]} = {str(certificate)!r}"
        needed = mismatch if error.reason in WRONG_KEY else "a file with an unencrypted PEM private key"
        raise InvalidInput.of(names[1], str(key), needed) from error
    except OSError as error:
        raise InvalidInput.of(names[1], str(key), f"a readable PEM file ({error.strerror})") from error
    if pair != (_read(names[0], certificate), _read(names[1], key)):
        # OpenSSL read the files by itself: only what has stayed the same was checked.
        raise InvalidInput.of(names[1], str(key), "left alone while it is read")
    return pair


def _read_certificate(field: str, path: Path) -> bytes:
    content = _read(field, path)
    try:
        _context().load_verify_locations(cafile=path)
    except ssl.SSLError as error:
        raise InvalidInput.of(field, str(path), "a file with a PEM certificate") from error
    return content


def _read(field: str, path: Path) -> bytes:
    return read_live(field, path, "PEM")


def _states(paths: tuple[Path | None, ...]) -> Iterator[tuple[int, ...]]:
    for path in paths:
        try:
            found = None if path is None else path.stat()
        except OSError:
            found = None
        yield () if found is None else (found.st_ino, found.st_size, found.st_mtime_ns)


def _context() -> ssl.SSLContext:
    """Takes keys of any strength, as gRPC does."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    return context
