"""TLS files: read, and checked before gRPC sees them, whose own refusals name no file.

Fields are named as a configuration does: `server.tls_key`, `target.tls_ca`.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from paceline.protocol.errors import InvalidInput

WRONG_KEY = ("KEY_VALUES_MISMATCH", "NO_CERTIFICATE_ASSIGNED")
"""What OpenSSL calls the key of another certificate: of the same kind of key, and of another kind."""


def read_authority(field: str, path: Path | None) -> bytes | None:
    """The certificates to trust, PEM; None if there is no file.

    Raises:
        InvalidInput: the file is missing or unreadable, or has no certificate.
    """
    return None if path is None else _read_certificate(field, path)


def read_pair(section: str, certificate: Path | None, key: Path | None) -> tuple[bytes, bytes] | None:
    """A certificate and its private key, PEM, of the fields `tls_certificate` and `tls_key`; None if neither is set.

    Raises:
        InvalidInput: one is set without the other, missing or unreadable, is no certificate or
            no private key, or the key is not the certificate's.
    """
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
    return pair


def _read_certificate(field: str, path: Path) -> bytes:
    content = _read(field, path)
    try:
        _context().load_verify_locations(cafile=path)
    except ssl.SSLError as error:
        raise InvalidInput.of(field, str(path), "a file with a PEM certificate") from error
    return content


def _read(field: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInput.of(field, str(path), f"a readable PEM file ({error.strerror})") from error


def _context() -> ssl.SSLContext:
    """Takes keys of any strength, as gRPC does."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    return context
