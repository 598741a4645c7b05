"""A certificate authority and a certificate for each role, to try mutual TLS.

Production uses cert-manager or the like. Needs the library `cryptography` (the extra `tls`).
"""

from __future__ import annotations

import ipaddress
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
from paceline.runtime.files import replace_text
from paceline.runtime.roles import PeerRole

AUTHORITY = "ca"
TRUST_DOMAIN = "local"
HOSTS = ("localhost", LOCALHOST, "::1")
AUTHORITY_DAYS = 30
SKEW = timedelta(minutes=5)
"""How far clocks of other machines may be behind."""


@dataclass(frozen=True)
class Credential:
    """A certificate and its key, PEM."""

    certificate: bytes
    key: bytes

    def write(self, folder: Path, name: str) -> None:
        """Write NAME.crt and NAME.key, whole or not at all; only the owner may read the key."""
        replace_text(folder / f"{name}.key", self.key.decode(), 0o600)
        replace_text(folder / f"{name}.crt", self.certificate.decode(), 0o644)


@dataclass(frozen=True)
class Authority:
    """Signs certificates."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def create(cls, name: str = "Paceline development CA") -> Self:
        """A new authority, self-signed."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _name(name)
        lifetime = timedelta(days=AUTHORITY_DAYS)
        certificate = (
            _builder(subject, subject, key, datetime.now(UTC) - SKEW, datetime.now(UTC) + lifetime)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(certificate, key)

    @classmethod
    def in_folder(cls, folder: Path) -> Self:
        """The authority of a folder, or a new one, which is written there.

        Raises:
            InvalidInput: the folder has ca.crt or ca.key, but not an authority's pair.
        """
        certificate, key = folder / f"{AUTHORITY}.crt", folder / f"{AUTHORITY}.key"
        if not certificate.exists() and not key.exists():
            authority = cls.create()
            authority.own.write(folder, AUTHORITY)
            return authority
        try:
            private_key = serialization.load_pem_private_key(key.read_bytes(), None)
            own_certificate = x509.load_pem_x509_certificate(certificate.read_bytes())
        except (OSError, ValueError, TypeError) as error:
            raise InvalidInput.of("out", str(folder), f"a folder with its own ca.crt and ca.key ({error})") from error
        is_pair = private_key.public_key() == own_certificate.public_key()
        if not is_pair or not isinstance(private_key, ec.EllipticCurvePrivateKey):
            raise InvalidInput.of("out", str(folder), "a folder whose ca.key is the key of its ca.crt")
        return cls(own_certificate, private_key)

    @property
    def own(self) -> Credential:
        """Its own certificate and key."""
        return Credential(_pem(self.certificate), _key_pem(self.key))

    def issue(
        self,
        name: str,
        *,
        uris: Iterable[str] = (),
        hosts: Iterable[str] = (),
        lifetime: timedelta = timedelta(days=1),
        begins: datetime | None = None,
    ) -> Credential:
        """A certificate for either end of a connection; `hosts` are DNS names and IP addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        begins = begins or datetime.now(UTC) - SKEW
        ends = min(datetime.now(UTC) + lifetime, self.certificate.not_valid_after_utc)
        names = [x509.UniformResourceIdentifier(uri) for uri in uris] + [_host(host) for host in hosts]
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            _builder(_name(name), self.certificate.subject, key, begins, ends)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        return Credential(_pem(certificate), _key_pem(key))

    def issue_role(
        self, role: PeerRole, *, hosts: Iterable[str] = HOSTS, trust_domain: str = TRUST_DOMAIN, lifetime: timedelta
    ) -> Credential:
        """The certificate of a role, with its URI; that of a service has its DNS name and the hosts, too."""
        serves = role in (PeerRole.TARGET, PeerRole.DRAFT, PeerRole.COORDINATOR)
        names = (role.server_name, *hosts) if serves else ()
        return self.issue(role, uris=(role.uri(trust_domain),), hosts=names, lifetime=lifetime)


def write_certificates(
    folder: Path, *, hosts: Iterable[str] = HOSTS, trust_domain: str = TRUST_DOMAIN, lifetime: timedelta
) -> None:
    """Write a new certificate and key for each role, signed by the folder's authority.

    Raises:
        InvalidInput: the folder can't be written, or its authority can't be read.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority = Authority.in_folder(folder)
        for role in PeerRole:
            credential = authority.issue_role(role, hosts=hosts, trust_domain=trust_domain, lifetime=lifetime)
            credential.write(folder, role)
    except OSError as error:
        raise InvalidInput.of("out", str(folder), f"a folder that can be written ({error.strerror})") from error


def _builder(
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
