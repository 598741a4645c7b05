"""Under which names a gateway answers, and which sites a browser may send requests from."""

from __future__ import annotations

from typing import Any

import pytest

from paceline_gateway.http.sites import Sites
from tests.gateway.test_guard import GuardedApp

LOOPBACK = ("127.0.0.1", "::1", "[::1]", "localhost", "127.8.0.1")
OURS = ("127.0.0.1:8000", "localhost", "LocalHost.:8000", "[::1]:8000", "[::1]", "10.0.3.4:8000", "a.localhost", "")
FOREIGN = (
    "evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example:80", "a@127.0.0.1",
    "evil.example/127.0.0.1", "127.0.0.1:x", "2130706433", "127.1", "[::1", "[::1].evil.example",
    "evil.example#localhost",
)  # fmt: skip


@pytest.mark.parametrize("sites", [*(Sites((), bound) for bound in LOOPBACK), Sites(("api.example",), "0.0.0.0")])
def test_addresses_and_names_of_this_machine_are_known_and_others_are_not(sites: Sites) -> None:
    """Behind an address for everybody, too: probes have that of a pod."""
    assert [host for host in (*OURS, *FOREIGN) if sites.is_own(host)] == [*OURS]


def test_names_can_be_listed_and_elsewhere_all_are_known_until_one_is() -> None:
    listed = Sites(("API.example", "*.inner.example"), "127.0.0.1")
    assert all(listed.is_own(host) for host in ("api.example:443", "a.inner.example", "a.b.inner.example"))
    assert not any(listed.is_own(host) for host in ("a.api.example", "inner.example", "ainner.example"))
    assert Sites((), "0.0.0.0").is_own("evil.example")
    assert Sites(("*",), "127.0.0.1").is_own("evil.example")


@pytest.mark.parametrize(
    ("origin", "host", "foreign"),
    [
        ("http://localhost:8000", "localhost:8000", False),
        ("http://localhost:3000", "127.0.0.1:8000", False),
        ("https://api.example", "api.example", False),
        ("https://app.example", "api.example", False),
        ("http://evil.example", "localhost:8000", True),
        ("http://10.0.0.7", "localhost:8000", True),
        ("http://10.0.0.7", "10.0.0.8", True),
        ("http://localhost.evil.example", "localhost", True),
        ("http://localhost:8000@evil.example", "localhost", True),
        ("null", "localhost", True),
        ("", "localhost", True),
        ("file://", "", True),
    ],
)
def test_a_foreign_origin_is_of_another_name(origin: str, host: str, foreign: bool) -> None:
    assert Sites(("app.example",), "127.0.0.1").is_foreign(origin, host) == foreign


async def status(tenant: str = "", method: str = "POST", **headers: str) -> int:
    async def tenant_of(caller: Any) -> str:
        return tenant

    app = GuardedApp(tenant_of)
    answered = await app.status(1, method=method, **headers)
    assert (app.bytes_read > 0) == (answered == 200)
    return answered


async def test_a_foreign_site_is_refused_before_its_body_is_read() -> None:
    foreign = "http://evil.example"
    for method in ("POST", "GET"):
        assert await status(method=method, host="evil.example:8000", origin=foreign) == 421
    for origin in (foreign, "null"):
        assert await status(host="localhost:8000", origin=origin) == 403
    assert await status(host="localhost:8000", origin=foreign, authorization="Bearer invented") == 403
    assert await status(host="localhost:8000", origin="http://localhost:8000") == 200, "the page's own"
    assert await status(host="localhost:8000") == 200
    assert await status("alice", host="localhost:8000", origin=foreign) == 200, "no foreign page has a key"
    assert await status(method="GET", host="10.0.3.4:8000") == 200
