"""TLS on both sides of the gateway, and the coordinator's keys: refused, limited, revoked, never logged."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from paceline.access.keys import KeyLimits, new_key
from paceline.local.certificates import write_certificates
from paceline.local.service_process import Flags
from paceline.local.tls import peer_tls, server_tls
from paceline.runtime.roles import PeerRole
from tests.e2e.cluster import eventually
from tests.e2e.keys import write_keys
from tests.gateway.gateways import LONG, WAIT_S, Answer, GatewayCluster, answer_of

KEYS = {name: new_key() for name in ("alice", "few")}
LIMITS = {"few": KeyLimits(requests_per_minute=1)}
SECRET = "open sesame"
TURN: list[dict[str, str]] = [{"role": "user", "content": SECRET}]
OPENAI = {"message", "type", "param", "code"}
DIALECTS: dict[str, tuple[dict[str, Any], set[str], str]] = {
    "/v1/completions": ({"prompt": SECRET, "max_tokens": 2}, OPENAI, "invalid_request_error"),
    "/v1/chat/completions": ({"messages": TURN, "max_tokens": 2}, OPENAI, "invalid_request_error"),
    "/v1/responses": ({"input": SECRET, "max_output_tokens": 16}, OPENAI, "invalid_request_error"),
    "/v1/messages": ({"model": "", "messages": TURN, "max_tokens": 2}, {"type", "message"}, "authentication_error"),
    "/v1/messages/count_tokens": ({"model": "", "messages": TURN}, {"type", "message"}, "authentication_error"),
    "/tokenize": ({"prompt": SECRET}, OPENAI, "invalid_request_error"),
}
"""A request of each dialect, the fields of its errors, and the type of the one without a key."""


class GuardedGateway(GatewayCluster):
    """Mutual TLS between all, HTTPS for clients with a certificate, and keys."""

    def __init__(self, folder: Path) -> None:
        self.certificates = folder / "certificates"
        write_certificates(self.certificates, lifetime=timedelta(hours=1))
        self.keys = folder / "keys.json"
        write_keys(self.keys, KEYS, LIMITS)
        https = server_tls(self.certificates, PeerRole.COORDINATOR)
        peers = peer_tls(self.certificates, PeerRole.CLIENT)
        keys: Flags = {"api_keys": str(self.keys)}
        super().__init__(folder, https | peers, coordinator_flags=keys, tls=self.certificates)
        self.api_key = KEYS["alice"]

    def connection(self, *, certified: bool = True) -> http.client.HTTPSConnection:
        context = ssl.create_default_context(cafile=self.certificates / "ca.crt")
        context.check_hostname = False  # the certificates name roles
        if certified:
            context.load_cert_chain(self.certificates / "client.crt", self.certificates / "client.key")
        return http.client.HTTPSConnection(self.address_of("gateway"), timeout=WAIT_S, context=context)

    def ask(self, path: str, body: dict[str, Any], key: str | None, **headers: str) -> Answer:
        with closing(self.connection()) as connection:
            return answer_of(begun(connection, path, body, key, **headers))

    def look(self, path: str, **headers: str) -> Answer:
        with closing(self.connection()) as connection:
            connection.request("GET", path, headers=headers)
            return answer_of(connection.getresponse())

    @property
    def log(self) -> str:
        return self.processes["gateway"].log_file.read_text()


def begun(
    connection: http.client.HTTPSConnection, path: str, body: dict[str, Any], key: str | None, **more: str
) -> http.client.HTTPResponse:
    headers = {"Content-Type": "application/json"} | more | ({"Authorization": f"Bearer {key}"} if key else {})
    connection.request("POST", path, json.dumps(body), headers)
    return connection.getresponse()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedGateway]:
    with GuardedGateway(tmp_path_factory.mktemp("guarded")) as running:
        yield running


@pytest.mark.parametrize("path", DIALECTS)
def test_no_key_and_a_wrong_one_are_401_in_each_shape(guarded: GuardedGateway, path: str) -> None:
    body, fields, kind = DIALECTS[path]
    streamed = body if path.endswith(("tokenize", "count_tokens")) else body | {"stream": True}
    strangers: list[dict[str, str]] = [{}, {"Authorization": "Bearer wrong"}, {"X-Api-Key": "wrong"}]
    for headers, asked in zip(strangers, (body, streamed, body), strict=True):
        answer = guarded.ask(path, asked, None, **headers)
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer"), answer.content
        error = answer.json["error"]
        assert (set(error), error["type"]) == (fields, kind)
        assert not any(key in error["message"] for key in KEYS.values())
    assert guarded.ask(path, body, KEYS["alice"]).status == 200
    assert guarded.ask(path, streamed, None, **{"X-Api-Key": KEYS["alice"]}).status == 200
    assert guarded.ask(path, streamed, None).status == 401, "nobody uses another's key"


def test_probes_have_no_key_and_models_are_shown_to_who_has_one(guarded: GuardedGateway) -> None:
    assert guarded.look("/v1/models").status == 401
    assert guarded.look("/v1/models", Authorization=f"Bearer {KEYS['alice']}").status == 200
    assert guarded.look("/health").status == 200


def test_https_demands_a_certificate_of_the_authority(guarded: GuardedGateway) -> None:
    plain = http.client.HTTPConnection(guarded.address_of("gateway"), timeout=WAIT_S)
    for refused in (guarded.connection(certified=False), plain):
        with closing(refused), pytest.raises((OSError, http.client.HTTPException)):
            refused.request("GET", "/ping")
            refused.getresponse()
    assert guarded.look("/ping").status == 200


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_a_key_beyond_its_rate_is_told_when_to_come_again(guarded: GuardedGateway, path: str) -> None:
    body = DIALECTS[path][0]
    answers = [guarded.ask(path, body, KEYS["few"]) for _ in range(2)]
    limited = answers[-1]
    assert (limited.status, limited.json["error"]["type"]) == (429, "rate_limit_error"), limited.content
    assert 1 <= int(limited.headers["retry-after"]) <= 60
    assert guarded.ask(path, body, KEYS["alice"]).status == 200, "others are not limited"


def test_a_key_that_is_revoked_ends_its_streams_with_an_error(guarded: GuardedGateway) -> None:
    path = "/v1/chat/completions"
    body = DIALECTS[path][0] | {"max_tokens": LONG, "stream": True, "ignore_eos": True}
    connection = guarded.connection()
    response = begun(connection, path, body, KEYS["alice"])
    assert response.status == 200
    response.readline()
    try:
        write_keys(guarded.keys, {"few": KEYS["few"]})
        data = [json.loads(line[6:]) for line in response if line.startswith(b"data: {")]
        error = data[-1]["error"]
        assert error["code"] == "invalid_api_key"
        assert KEYS["alice"] not in json.dumps(data[-1])
        assert guarded.ask(path, DIALECTS[path][0], KEYS["alice"]).status == 401
    finally:
        write_keys(guarded.keys, KEYS, LIMITS)
        connection.close()
    eventually(lambda: guarded.ask(path, DIALECTS[path][0], KEYS["alice"]).status == 200, "the key counts again")
    eventually(lambda: guarded.status("target").sessions == 0, "no session runs")


def test_the_log_has_one_line_for_each_request_and_no_text_or_key(guarded: GuardedGateway) -> None:
    body, mine = DIALECTS["/v1/completions"][0], {"X-Request-Id": "of-this-test"}
    guarded.ask("/v1/completions", body, KEYS["alice"], **mine)
    guarded.ask("/v1/completions", body | {"temperature": SECRET}, KEYS["alice"], **mine)
    guarded.ask(f"/v1/nothing%0a?prompt={SECRET.replace(' ', '+')}", body, "wrong", **mine)

    def lines() -> list[str]:
        return [line for line in guarded.log.splitlines() if line.endswith("id=of-this-test")]

    eventually(lambda: len(lines()) >= 3, "three lines")
    assert [line.partition("status=")[2][:3] for line in lines()] == ["200", "400", "401"]
    assert all("request: method=POST path=/v1/" in line for line in lines())
    written = guarded.log
    for secret in (*KEYS.values(), SECRET, SECRET.replace(" ", "+"), "wrong", "BEGIN"):
        assert secret not in written
