"""A certificate authority and a certificate for each role, to try mutual TLS out with.

Production has cert-manager or the like. Needs the library `cryptography` (the extra `tls`).
"""

from __future__ import annotations

import ipaddress
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from paceline.protocol.errors import InvalidInput
from paceline.runtime.config import LOCALHOST
from paceline.runtime.roles import Role

AUTHORITY = "ca"
TRUST_DOMAIN = "local"
HOSTS = ("localhost", LOCALHOST, "::1")
AUTHORITY_DAYS = 30
SKEW = timedelta(minutes=5)
"""How far other machines' clocks may be behind."""


@dataclass(frozen=True)
class Issued:
    """A certificate and its key, PEM."""

    certificate: bytes
    key: bytes

    def write(self, folder: Path, name: str) -> None:
        """As NAME.crt and NAME.key, which its owner alone may read; a reader of either sees all of it."""
        _replace(folder / f"{name}.key", self.key, 0o600)
        _replace(folder / f"{name}.crt", self.certificate, 0o644)


@dataclass(frozen=True)
class Authority:
    """Signs certificates."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def create(cls, name: str = "Paceline development CA") -> Self:
        """A new one, self-signed."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _name(name)
        lifetime = timedelta(days=AUTHORITY_DAYS)
        certificate = (
            _begun(subject, subject, key, datetime.now(UTC) - SKEW, datetime.now(UTC) + lifetime)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(certificate, key)

    @classmethod
    def in_folder(cls, folder: Path) -> Self:
        """The one whose files are in a folder, or a new one, written there.

        Raises:
            InvalidInput: the files are there and are no authority's.
        """
        certificate, key = folder / f"{AUTHORITY}.crt", folder / f"{AUTHORITY}.key"
        if not certificate.exists() and not key.exists():
            created = cls.create()
            created.own.write(folder, AUTHORITY)
            return created
        try:
            loaded = serialization.load_pem_private_key(key.read_bytes(), None)
            found = x509.load_pem_x509_certificate(certificate.read_bytes())
        except (OSError, ValueError, TypeError) as error:
            raise InvalidInput.of("out", str(folder), f"a folder with its own ca.crt and ca.key ({error})") from error
        if not isinstance(loaded, ec.EllipticCurvePrivateKey) or loaded.public_key() != found.public_key():
            raise InvalidInput.of("out", str(folder), "a folder whose ca.key is the key of its ca.crt")
        return cls(found, loaded)

    @property
    def own(self) -> Issued:
        """Its own certificate and key."""
        return Issued(_pem(self.certificate), _key_pem(self.key))

    def issue(
        self,
        name: str,
        *,
        uris: Iterable[str] = (),
        hosts: Iterable[str] = (),
        lifetime: timedelta = timedelta(days=1),
        begins: datetime | None = None,
    ) -> Issued:
        """A certificate, for either end of a connection; `hosts` are DNS names and IP addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        begins = begins or datetime.now(UTC) - SKEW
        ends = min(datetime.now(UTC) + lifetime, self.certificate.not_valid_after_utc)
        names = [x509.UniformResourceIdentifier(uri) for uri in uris] + [_host(host) for host in hosts]
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            _begun(_name(name), self.certificate.subject, key, begins, ends)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        return Issued(_pem(certificate), _key_pem(key))

    def issue_role(
        self, role: Role, *, hosts: Iterable[str] = HOSTS, trust_domain: str = TRUST_DOMAIN, lifetime: timedelta
    ) -> Issued:
        """The certificate of a role: its URI, and where it serves its DNS name and the hosts."""
        serves = role in (Role.TARGET, Role.DRAFT, Role.COORDINATOR)
        names = (role.server_name, *hosts) if serves else ()
        return self.issue(role, uris=(role.uri(trust_domain),), hosts=names, lifetime=lifetime)


def write_certificates(
    folder: Path, *, hosts: Iterable[str] = HOSTS, trust_domain: str = TRUST_DOMAIN, lifetime: timedelta
) -> None:
    """Write a certificate and a key for each role, new ones each time, of the folder's authority.

    Raises:
        InvalidInput: the folder can't be written, or its authority not read.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority = Authority.in_folder(folder)
        for role in Role:
            issued = authority.issue_role(role, hosts=hosts, trust_domain=trust_domain, lifetime=lifetime)
            issued.write(folder, role)
    except OSError as error:
        raise InvalidInput.of("out", str(folder), f"a folder that can be written ({error.strerror})") from error


def _begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, begins: datetime, ends: datetime
) -> x509.CertificateBuilder:
    public = key.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _replace(file: Path, content: bytes, mode: int) -> None:
    beside = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
        out.write(content)
    beside.replace(file)
