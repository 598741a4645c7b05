"""Who gets through a handshake and to which method, and what both sides are told; files that change under way."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509

from paceline.local.certificates import Authority, Credential
from paceline.protocol.errors import PacelineError, PeerUnavailable, PermissionDenied, UntrustedPeer
from paceline.rpc import authorization
from paceline.rpc.channel import open_channel
from paceline.rpc.peer_link import TargetLink
from paceline.rpc.server import warn_if_exposed, warn_of_callers
from paceline.rpc.statuses import from_rpc_error
from paceline.runtime.config import CoordinatorConfig, PeerSettings, PoolSettings, ServerSettings
from paceline.runtime.roles import PeerRole, role_in
from tests.rpc.harness import HELLO, WELCOME, until
from tests.rpc.test_server import METHODS, SERVING, call_without_a_message, health_of, register_all, service

HOUR = timedelta(hours=1)


@dataclass(frozen=True)
class Pki:
    """An authority's folder, and who it has certified."""

    folder: Path
    authority: Authority

    @property
    def ca(self) -> Path:
        return self.folder / "ca.crt"

    def file(self, name: str) -> Path:
        return self.folder / name

    def certify(self, name: str, *uris: str, authority: Authority | None = None, **facts: Any) -> str:
        """Write a certificate with any URIs under a name; returns the name."""
        (authority or self.authority).issue(name, uris=uris, **facts).write(self.folder, name)
        return name

    def server(self, name: str = "target", **settings: Any) -> ServerSettings:
        certificate, key = self.file(f"{name}.crt"), self.file(f"{name}.key")
        return ServerSettings(tls_certificate=certificate, tls_key=key, tls_client_ca=self.ca, **settings)

    def peer(self, port: int, name: str | None = "coordinator", **settings: Any) -> PeerSettings:
        files = {"tls_certificate": self.file(f"{name}.crt"), "tls_key": self.file(f"{name}.key")} if name else {}
        known = {"address": f"127.0.0.1:{port}", "tls_ca": self.ca, "server_name": PeerRole.TARGET.server_name}
        return PeerSettings(**(known | files | settings))


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    authority = Authority.in_folder(tmp_path)
    for role in PeerRole:
        authority.issue_role(role, lifetime=HOUR).write(tmp_path, role)
    return Pki(tmp_path, authority)


@pytest.fixture
async def port(pki: Pki) -> AsyncIterator[int]:
    """Of a target that shows a certificate, and asks for one."""
    async with service(pki.server()) as running:
        yield running.port


def past() -> dict[str, Any]:
    """Facts of a certificate that has expired."""
    return {"begins": datetime.now(UTC) - 2 * HOUR, "lifetime": -HOUR}


@asynccontextmanager
async def linked(settings: PeerSettings) -> AsyncIterator[TargetLink]:
    link = TargetLink(settings, HELLO, reconnect_max_ms=100)
    await link.start()
    try:
        yield link
    finally:
        await link.close()


async def refusal_of(settings: PeerSettings) -> PacelineError:
    """Why no link comes about."""
    async with linked(settings) as link:
        await until(lambda: link.last_error)
        assert link.last_error is not None
        return link.last_error


async def call(settings: PeerSettings, method: Any) -> tuple[grpc.StatusCode, PacelineError]:
    """Send one method what is no message: whoever is let in is told so."""
    async with open_channel(settings) as channel:
        sent = call_without_a_message(channel, method)
        code = await sent.code()
        facts = await sent.initial_metadata(), await sent.trailing_metadata(), await sent.details()
        error = grpc.aio.AioRpcError(code, *facts)
    return code, from_rpc_error(error)


SERVED = {
    "Verify": {PeerRole.COORDINATOR},
    "GetTargetStatus": {PeerRole.COORDINATOR, PeerRole.OPERATOR},
    "Draft": {PeerRole.COORDINATOR},
    "GetDraftStatus": {PeerRole.COORDINATOR, PeerRole.OPERATOR},
    "Generate": {PeerRole.CLIENT, PeerRole.OPERATOR},
    "DescribeModels": {PeerRole.CLIENT, PeerRole.OPERATOR},
    "Check": set(PeerRole),
    "List": set(PeerRole),
    "Watch": set(PeerRole),
}


def test_every_method_says_who_may_call_it() -> None:
    names = {f"/{method.containing_service.full_name}/{method.name}": method.name for method in METHODS}
    assert {path: SERVED[name] for path, name in names.items()} == authorization.CALLERS


@pytest.mark.parametrize("role", [PeerRole.COORDINATOR, PeerRole.OPERATOR, PeerRole.CLIENT, None])
async def test_a_role_opens_its_own_methods_and_no_others(pki: Pki, role: PeerRole | None) -> None:
    name = role or pki.certify("stranger")
    async with service(pki.server(), register=register_all) as running:
        for method in METHODS:
            code, error = await call(pki.peer(running.port, name), method)
            if role in SERVED[method.name]:
                assert code is grpc.StatusCode.INVALID_ARGUMENT, method.name
                continue
            assert (code, type(error)) == (grpc.StatusCode.PERMISSION_DENIED, PermissionDenied), method.name
            assert f"spiffe://TRUST-DOMAIN/paceline/{min(SERVED[method.name])}" in error.message
            assert f" = {role or 'none (its URIs: none)'}: must be " in error.message


async def test_without_roles_any_certificate_of_the_authority_will_do_and_probes_need_none(pki: Pki) -> None:
    stranger = pki.certify("stranger")
    settings = pki.server(tls_roles="off", health_port=0)
    async with service(settings) as running, linked(pki.peer(running.port, stranger)) as link:
        assert await link.wait_up(10) == WELCOME
        probe = running.running[0].health_port
        assert probe is not None
        assert await health_of(probe) == SERVING


@pytest.mark.parametrize(
    ("uris", "role"),
    [
        (("spiffe://prod/paceline/client", "https://example.org/"), PeerRole.CLIENT),
        (("spiffe://prod/paceline/client", "spiffe://prod/paceline/coordinator"), None),
        (("spiffe://prod/paceline/root",), None),
        (("spiffe://prod/ns/x/paceline/coordinator",), None),
        (("spiffe:///paceline/coordinator",), None),
        (("https://prod/paceline/coordinator",), None),
        (("spiffe://prod/paceline/coordinator\n",), None),
        ((), None),
    ],
)
def test_a_certificate_has_a_role_or_none(uris: tuple[str, ...], role: PeerRole | None) -> None:
    assert role_in(uris) is role


REFUSED_CALLERS: dict[str, tuple[Callable[[Pki, int], PeerSettings], str]] = {
    "no certificate": (lambda pki, port: pki.peer(port, None), "PEER_DID_NOT_RETURN_A_CERTIFICATE"),
    "another authority": (
        lambda pki, port: pki.peer(port, "foreign"),
        "CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate",
    ),
    "expired": (lambda pki, port: pki.peer(port, "expired"), "CERTIFICATE_VERIFY_FAILED: certificate has expired"),
    "plaintext": (lambda pki, port: PeerSettings(address=f"127.0.0.1:{port}"), "WRONG_VERSION_NUMBER"),
}


@pytest.mark.parametrize("case", REFUSED_CALLERS)
async def test_a_caller_that_the_handshake_refuses(
    pki: Pki, case: str, capfd: pytest.CaptureFixture[str], port: int
) -> None:
    uri = PeerRole.COORDINATOR.uri()
    pki.certify("foreign", uri, authority=Authority.create("another CA"))
    pki.certify("expired", uri, **past())
    settings, reason = REFUSED_CALLERS[case]
    error = await refusal_of(settings(pki, port))
    assert isinstance(error, PeerUnavailable)
    assert f"target at 127.0.0.1:{port}: it hung up while connecting" in error.message
    assert "tls_client_ca" in error.message
    async with linked(pki.peer(port)) as link:
        assert await link.wait_up(10) == WELCOME, "the next one is served"
    assert "Handshake failed with error SSL_ERROR_SSL: error:" in (log := capfd.readouterr().err)
    assert reason in log


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("foreign", "its certificate is of no authority in this side's tls_ca"),
        ("expired", "its certificate has expired"),
        ("draft", "its certificate lacks the DNS name that is expected of it"),
        ("", "it does not speak TLS"),
    ],
)
async def test_a_server_that_the_handshake_refuses(pki: Pki, name: str, reason: str) -> None:
    hosts = [PeerRole.TARGET.server_name]
    pki.certify("foreign", hosts=hosts, authority=Authority.create("another CA"))
    pki.certify("expired", hosts=hosts, **past())
    async with service(pki.server(name) if name else ServerSettings()) as running:
        error = await refusal_of(pki.peer(running.port))
    assert type(error) is UntrustedPeer
    assert f"target at 127.0.0.1:{running.port}: {reason}" in error.message


def test_a_coordinator_expects_roles_of_its_peers_once_it_shows_a_certificate(tmp_path: Path) -> None:
    plain = CoordinatorConfig(peer_ca=tmp_path / "ca.crt")
    assert plain.reach(plain.target, PeerRole.TARGET, "there:1").server_name is None
    assert plain.reach(plain.target, PeerRole.TARGET, "10.0.0.1:1", "there").server_name == "there"
    mutual = {"peer_ca": tmp_path / "ca", "peer_certificate": tmp_path / "crt", "peer_key": tmp_path / "key"}
    config = CoordinatorConfig(**mutual, draft=PoolSettings(address=("there:1",)))
    assert config.draft is not None
    reached = config.reach(config.draft, PeerRole.DRAFT, "there:1")
    assert (reached.address, reached.server_name) == ("there:1", "draft.paceline")
    assert {name: getattr(reached, f"tls_{name[5:]}") for name in mutual} == mutual
    off = config.model_copy(update={"peer_roles": "off"})
    assert off.reach(off.target, PeerRole.TARGET, "there:1").server_name is None


def serial(issued: Credential) -> int:
    return x509.load_pem_x509_certificate(issued.certificate).serial_number


def records_of(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


async def test_a_link_that_connects_again_shows_its_new_certificate(pki: Pki) -> None:
    seen: list[int] = []
    check = authorization.check_caller

    def noted(method: str, peer: str, identity: Any) -> None:
        seen.append(x509.load_pem_x509_certificate(identity["x509_pem_cert"][0]).serial_number)
        check(method, peer, identity)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(authorization, "check_caller", noted)
        async with service(pki.server()) as running, linked(pki.peer(running.port)) as link:
            await link.wait_up(10)
            first = pki.authority.issue_role(PeerRole.COORDINATOR, lifetime=HOUR)
            first.write(pki.folder, "coordinator")
            link.drop(PeerUnavailable("a test's wish"))
            await link.wait_up(10)
            # Half a pair: the link comes back with the last one that was right.
            second = pki.authority.issue_role(PeerRole.COORDINATOR, lifetime=HOUR)
            pki.file("coordinator.crt").write_bytes(second.certificate)
            link.drop(PeerUnavailable("a test's wish"))
            await link.wait_up(10)
    assert seen[1:] == [serial(first), serial(first)]
    assert seen[0] != seen[1]


async def test_a_new_authority_of_clients_holds_from_the_next_connection_on(pki: Pki, port: int) -> None:
    successor = Authority.create("the next CA")
    pki.certify("next", PeerRole.COORDINATOR.uri(), authority=successor)
    error = await refusal_of(pki.peer(port, "next"))
    assert isinstance(error, PeerUnavailable)
    pki.ca.write_bytes(pki.ca.read_bytes() + successor.own.certificate)
    for name in ("next", "coordinator"):
        async with linked(pki.peer(port, name)) as link:
            assert await link.wait_up(10) == WELCOME


@pytest.mark.parametrize("host", ["127.8.8.8", "[::1]", "localhost"])
def test_what_this_machine_alone_can_reach_is_not_exposed(host: str, caplog: pytest.LogCaptureFixture) -> None:
    settings = ServerSettings(host=host)
    warn_if_exposed(settings, "plaintext", "set …")
    warn_of_callers(settings)
    assert not caplog.records


@pytest.mark.parametrize("host", ["0.0.0.0", "target.example"])
def test_what_others_can_reach_is_named_with_its_remedy(host: str, caplog: pytest.LogCaptureFixture) -> None:
    warn_if_exposed(ServerSettings(host=host, port=5), "plaintext", "set server.tls_certificate")
    warn_of_callers(ServerSettings(host=host, port=5))
    warn_of_callers(ServerSettings(host=host, port=5, tls_client_ca=Path("ca"), tls_roles="off"))
    warn_of_callers(ServerSettings(host=host, port=5, tls_client_ca=Path("ca")))
    told = [record.getMessage().partition("; ")[0] for record in caplog.records]
    assert told == [
        f"unsafe to expose: {what} on server.host = {host}, port 5"
        for what in (
            "plaintext",
            "any caller may open sessions",
            "any certificate of server.tls_client_ca may open sessions",
        )
    ]
    assert "set server.tls_certificate, or server.host = 127.0.0.1" in caplog.records[0].getMessage()


async def test_a_plaintext_server_says_so_at_start(caplog: pytest.LogCaptureFixture) -> None:
    async with service(ServerSettings(host="0.0.0.0")):
        assert len(records_of(caplog, "unsafe to expose: plaintext on server.host = 0.0.0.0")) == 1
