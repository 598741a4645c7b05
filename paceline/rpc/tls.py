"""TLS files: checked before gRPC reads them, since its own refusals name no file, and read again when they change.

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
from paceline.runtime.files import read_live

logger = logging.getLogger(__name__)

WRONG_KEY = ("KEY_VALUES_MISMATCH", "NO_CERTIFICATE_ASSIGNED")
"""OpenSSL's reasons for the key of another certificate, of the same type of key and of another type."""
MAX_SECTIONS = 64
"""Most sets of client files in the cache."""


@dataclass(frozen=True)
class TlsMaterial:
    """Content of a section's files, PEM: a certificate with its key, and the trusted authorities."""

    pair: tuple[bytes, bytes] | None
    authority: bytes | None

    @property
    def digest(self) -> str:
        """Identifies the certificate in logs: the first digits of the file's SHA-256."""
        return "none" if self.pair is None else hashlib.sha256(self.pair[0]).hexdigest()[:16]


@dataclass(frozen=True)
class TlsPaths:
    """A section's files; `section` and `authority_field` are their names in the configuration."""

    section: str
    authority_field: str
    certificate: Path | None
    key: Path | None
    authority: Path | None

    def read(self) -> TlsMaterial:
        """Read and check the files.

        Raises:
            InvalidInput: a file is missing, unreadable or wrong, or one is set without the other.
        """
        pair = _read_pair(self.section, self.certificate, self.key)
        field = f"{self.section}{self.authority_field}"
        return TlsMaterial(pair, None if self.authority is None else _read_certificate(field, self.authority))

    def state(self) -> tuple[tuple[int, ...], ...]:
        """Inode, size and time of each file; it changes when a file does, or when a link points to another file."""
        return tuple(_states((self.certificate, self.key, self.authority)))


class TlsFiles:
    """The last valid content of a section's files. Thread-safe."""

    def __init__(self, paths: TlsPaths) -> None:
        self._paths = paths
        self._lock = threading.Lock()
        self._state: tuple[tuple[int, ...], ...] = ()
        self._material: TlsMaterial | None = None
        self._is_stale = False

    def read(self) -> TlsMaterial:
        """The content for a new connection.

        If changed files are not valid, for example because a certificate's key is not written yet, the last valid
        content stays in force; that is logged once for each change, and counted at each connection.

        Raises:
            InvalidInput: the files have never been valid.
        """
        with self._lock:
            state = self._paths.state()
            if self._material is None:
                self._material = self._paths.read()
            elif state != self._state:
                self._material = self._read_again(self._material)
            self._state = state
            if self._is_stale:
                metrics.reload_failed("tls")
            return self._material

    def _read_again(self, previous: TlsMaterial) -> TlsMaterial:
        section = self._paths.section.rstrip(".") or "client"
        try:
            material = self._paths.read()
        except InvalidInput as error:
            logger.warning("TLS files are not right, the last ones stay: section=%s error=%s", section, error.message)
            self._is_stale = True
            return previous
        self._is_stale = False
        if material == previous:
            return previous
        logger.info("TLS files read again: section=%s certificate=%s", section, material.digest)
        return material


def server_files(settings: ServerSettings) -> TlsFiles:
    """The TLS files of a server."""
    return TlsFiles(
        TlsPaths("server.", "tls_client_ca", settings.tls_certificate, settings.tls_key, settings.tls_client_ca)
    )


def server_credentials(settings: ServerSettings) -> grpc.ServerCredentials | None:
    """A server's credentials, which follow its files: each handshake uses their current content. None: plaintext.

    Raises:
        InvalidInput: a file is missing or wrong.
    """
    files = server_files(settings)
    current = files.read()
    if current.pair is None:
        if current.authority is not None:
            limit = "set together with server.tls_certificate and server.tls_key"
            raise InvalidInput.of("server.tls_client_ca", str(settings.tls_client_ca), limit)
        return None

    def next_configuration() -> grpc.ServerCertificateConfiguration | None:
        """Called on gRPC's threads before each handshake; None: no change."""
        nonlocal current
        material = files.read()
        if material is current:
            return None
        current = material
        return _configuration(material)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(current),
        next_configuration,  # type: ignore[arg-type]  # the stub forgets that None is allowed
        require_client_authentication=current.authority is not None,
    )


def channel_credentials(settings: PeerSettings, section: str) -> grpc.ChannelCredentials | None:
    """A channel's credentials from the current files; None: plaintext.

    Raises:
        InvalidInput: a file is missing or wrong.
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
    """The files of a section, shared by all its links and connections."""
    return TlsFiles(paths)


def _configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    assert material.pair is not None, "a TLS server has a certificate"
    certificate, key = material.pair
    return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=material.authority)


def _read_pair(section: str, certificate: Path | None, key: Path | None) -> tuple[bytes, bytes] | None:
    """Certificate and private key from `tls_certificate` and `tls_key`; None if neither is set."""
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
        limit = mismatch if error.reason in WRONG_KEY else "a file with an unencrypted PEM private key"
        raise InvalidInput.of(names[1], str(key), limit) from error
    except OSError as error:
        raise InvalidInput.of(names[1], str(key), f"a readable PEM file ({error.strerror})") from error
    if pair != (_read(names[0], certificate), _read(names[1], key)):
        # OpenSSL read the files by itself, so its check covers only content that has not changed.
        raise InvalidInput.of(names[1], str(key), "unchanged while it is read")
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
            status = None if path is None else path.stat()
        except OSError:
            status = None
        yield () if status is None else (status.st_ino, status.st_size, status.st_mtime_ns)


def _context() -> ssl.SSLContext:
    """A context that accepts keys of any strength, as gRPC does."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    return context
