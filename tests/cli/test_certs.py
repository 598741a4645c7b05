"""`paceline certs`: what it writes, and that it signs again."""

from __future__ import annotations

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.local.certificates import Authority
from paceline.local.tls import check_folder
from paceline.protocol.errors import InvalidInput
from paceline.runtime.roles import PeerRole, role_in

runner = CliRunner(env={"COLUMNS": "250", "TERM": "dumb"})


def certificate(file: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(file.read_bytes())


def names(file: Path) -> x509.SubjectAlternativeName:
    return certificate(file).extensions.get_extension_for_class(x509.SubjectAlternativeName).value


def certs(folder: Path, *flags: str) -> str:
    result = runner.invoke(app, ["certs", "--out", str(folder), *flags])
    assert result.exit_code == 0, result.output
    return result.output


def test_each_role_gets_a_certificate_and_keys_are_their_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    output = certs(
        folder, "--trust-domain", "demo.example", "--host", "target.svc", "--host", "10.0.0.9", "--hours", "2"
    )
    check_folder(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    left = certificate(folder / "target.crt").not_valid_after_utc - datetime.now(UTC)
    assert timedelta(hours=1.9) < left < timedelta(hours=2)
    for role in PeerRole:
        assert stat.S_IMODE((folder / f"{role}.key").stat().st_mode) == 0o600
        shown = names(folder / f"{role}.crt")
        uris = shown.get_values_for_type(x509.UniformResourceIdentifier)
        assert uris == [f"spiffe://demo.example/paceline/{role}"]
        assert role_in(uris) is role
        assert uris[0] in output
        serves = role in (PeerRole.TARGET, PeerRole.DRAFT, PeerRole.COORDINATOR)
        assert shown.get_values_for_type(x509.DNSName) == ([f"{role}.paceline", "target.svc"] if serves else [])
        assert bool(shown.get_values_for_type(x509.IPAddress)) is serves
    assert not [file for file in folder.iterdir() if file.suffix not in (".crt", ".key")]


def test_the_same_authority_signs_again(tmp_path: Path) -> None:
    certs(tmp_path)
    authority, first = (tmp_path / "ca.crt").read_bytes(), certificate(tmp_path / "target.crt")
    certs(tmp_path)
    assert (tmp_path / "ca.crt").read_bytes() == authority
    second = certificate(tmp_path / "target.crt")
    assert second.serial_number != first.serial_number
    second.verify_directly_issued_by(certificate(tmp_path / "ca.crt"))


@pytest.mark.parametrize("damage", ["no key", "another key", "no PEM"])
def test_a_folder_whose_authority_is_damaged_is_named(tmp_path: Path, damage: str) -> None:
    certs(tmp_path)
    if damage == "no key":
        (tmp_path / "ca.key").unlink()
    else:
        (tmp_path / "ca.key").write_bytes(Authority.create().own.key if damage == "another key" else b"x")
    result = runner.invoke(app, ["certs", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert f"out = {str(tmp_path)!r}: must be a folder w" in result.output


def test_serve_names_the_file_that_its_folder_lacks(tmp_path: Path) -> None:
    certs(tmp_path)
    (tmp_path / "draft.key").unlink()
    with pytest.raises(InvalidInput, match=r"tls = .*: must be a folder as `paceline certs` writes it \(draft.key"):
        check_folder(tmp_path)
