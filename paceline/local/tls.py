"""The TLS settings of services on this machine, from one folder of role certificates.

The folder is laid out as `paceline certs` writes it: `ca.crt`, and for each role `ROLE.crt` and `ROLE.key`.
"""

from __future__ import annotations

from pathlib import Path

from paceline.protocol.errors import InvalidInput
from paceline.runtime.config import PeerSettings
from paceline.runtime.roles import PeerRole


def server_tls(folder: Path | None, role: PeerRole) -> dict[str, object]:
    """Settings of a service that serves as `role` and demands certificates; none without a folder."""
    if folder is None:
        return {}
    certificate, key = _files(folder, role)
    return {
        "server.tls_certificate": certificate,
        "server.tls_key": key,
        "server.tls_client_ca": str(_authority(folder)),
    }


def peer_tls(folder: Path | None, role: PeerRole = PeerRole.COORDINATOR) -> dict[str, object]:
    """Settings of a coordinator for its target and draft, or of a gateway, whose role is client, for its coordinator.

    None without a folder.
    """
    if folder is None:
        return {}
    certificate, key = _files(folder, role)
    return {"peer_ca": str(_authority(folder)), "peer_certificate": certificate, "peer_key": key}


def operator_of(folder: Path | None, address: str, role: PeerRole) -> PeerSettings:
    """The operator's connection to a service that serves as `role`."""
    if folder is None:
        return PeerSettings(address=address)
    certificate, key = _files(folder, PeerRole.OPERATOR)
    return PeerSettings(
        address=address,
        tls_ca=_authority(folder),
        tls_certificate=Path(certificate),
        tls_key=Path(key),
        server_name=role.server_name,
    )


def check_folder(folder: Path | None) -> None:
    """Refuse a folder without the certificates.

    Raises:
        InvalidInput: naming the first missing file.
    """
    if folder is None:
        return
    files = [_authority(folder), *(Path(file) for role in PeerRole for file in _files(folder, role))]
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None:
        limit = f"a folder as `paceline certs` writes it ({missing.name} is missing)"
        raise InvalidInput.of("tls", str(folder), limit)


def _authority(folder: Path) -> Path:
    return folder.absolute() / "ca.crt"


def _files(folder: Path, role: PeerRole) -> tuple[str, str]:
    return str(folder.absolute() / f"{role}.crt"), str(folder.absolute() / f"{role}.key")
