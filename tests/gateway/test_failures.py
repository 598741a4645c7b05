"""What fails behind the gateway is told as an error of its kind, and the next request works."""

from __future__ import annotations

import json
import select
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from paceline.access.keys import ApiKey, ApiKeys, hash_of, new_key, save_keys
from paceline.local.service_process import Flags
from tests.e2e.cluster import eventually, free_port
from tests.gateway.gateways import LONG, MODEL, GatewayCluster, openai_at, post, request, streaming

COMPLETION: dict[str, Any] = {"prompt": "a", "max_tokens": 5, "seed": 1}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}
WHOLE = 800
"""Tokens of a text that runs for some tenths of a second."""
ENDLESS = COMPLETION | {"max_tokens": LONG, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayCluster]:
    folder = tmp_path_factory.mktemp("failing")
    flags: Flags = {"coordinator_wait_ms": 300.0, "server.drain_seconds": 20.0}
    with GatewayCluster(folder, flags, coordinator_flags={"max_concurrent_requests": 2}) as running:
        yield running


def test_overload_says_when_to_try_again(cluster: GatewayCluster) -> None:
    address = cluster.address_of("gateway")
    path = "/v1/completions"
    with streaming(address, path, ENDLESS), streaming(address, path, ENDLESS):
        answer = cluster.post(path, COMPLETION)
    assert (answer.status, answer.error["code"]) == (429, "rate_limit_exceeded")
    assert int(answer.headers["retry-after"]) >= 1
    eventually(lambda: cluster.post(path, COMPLETION).status == 200, "room again")


def test_a_coordinator_that_is_gone_is_503_and_the_next_one_serves(cluster: GatewayCluster) -> None:
    wanted = cluster.post("/v1/completions", COMPLETION).json["choices"]
    cluster.kill("coordinator")
    for answer in (cluster.post("/v1/completions", COMPLETION), cluster.get("/v1/models"), cluster.get("/health")):
        assert (answer.status, answer.error["type"]) == (503, "service_unavailable_error"), answer.content
        assert int(answer.headers["retry-after"]) >= 1
    assert cluster.get("/ping").status == 200
    cluster.restart("coordinator")
    cluster.await_links()
    eventually(lambda: cluster.get("/health").status == 200, "healthy again")
    assert cluster.post("/v1/completions", COMPLETION).json["choices"] == wanted


def test_a_stream_that_breaks_ends_with_its_error_as_an_event(cluster: GatewayCluster) -> None:
    stream = openai_at(cluster.address_of("gateway")).completions.create(
        model="", prompt="a", max_tokens=LONG, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    cluster.kill("coordinator")
    try:
        with pytest.raises(openai.APIError) as caught:
            list(stream)
        assert caught.value.type == "service_unavailable_error"
    finally:
        cluster.restart("coordinator")
        cluster.await_links()
    eventually(lambda: cluster.post("/v1/completions", COMPLETION).status == 200, "serving again")


def test_a_target_that_is_gone_is_503_until_it_is_back(cluster: GatewayCluster) -> None:
    cluster.kill("target")
    eventually(lambda: cluster.get("/health").status == 503, "the target is missed")
    answer = cluster.post("/v1/completions", COMPLETION)
    assert (answer.status, "target" in answer.error["message"]) == (503, True)
    cluster.restart("target")
    eventually(lambda: cluster.get("/health").status == 200, "healthy again")
    assert cluster.post("/v1/completions", COMPLETION).status == 200


def test_keys_are_the_coordinators(cluster: GatewayCluster, tmp_path: Path) -> None:
    key, file = new_key(), tmp_path / "keys.json"
    save_keys(ApiKeys(keys=(ApiKey(name="alice", sha256=hash_of(key)),)), file)
    cluster.api_key = key
    with cluster.coordinator("guarded", {"api_keys": str(file)}) as coordinator:
        address = cluster.start_gateway("guarding", coordinator, free_port())
        wrong: tuple[dict[str, str], ...] = ({}, {"Authorization": "Bearer wrong"}, {"x_api_key": "wrong"})
        for headers in wrong:
            for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
                answer = post(address, path, body, **headers)
                assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
                assert answer.headers["www-authenticate"] == "Bearer"
                assert key not in answer.error["message"]
            assert request(address, "GET", "/v1/models", None, headers).status == 401
        for headers in ({"Authorization": f"Bearer {key}"}, {"x_api_key": key}):
            assert post(address, "/v1/completions", COMPLETION, **headers).status == 200
        assert post(address, "/v1/completions", COMPLETION).status == 401, "nobody uses another's key"
        assert openai_at(address, key).models.list().data[0].id
        assert request(address, "GET", "/health", None, {}).status == 200, "probes have no key"
        cluster.processes.pop("guarding").stop()


def test_coordinators_are_those_of_a_file_and_a_vanished_ones_streams_go_on(
    cluster: GatewayCluster, tmp_path: Path
) -> None:
    """As DNS names them, which the same class asks."""
    listed = tmp_path / "coordinators"
    listed.write_text("")
    address = cluster.start_gateway("following", f"file:{listed}", free_port())

    def shown() -> dict[str, int]:
        view = request(address, "GET", "/cluster", None, {}).json["coordinators"]
        return {each["address"]: each["requests"] for each in view}

    answer = post(address, "/v1/completions", COMPLETION)
    assert (answer.status, str(listed) in answer.error["message"]) == (503, True)
    with cluster.coordinator("second", {}) as second:
        listed.write_text(f"{second}\n")
        eventually(lambda: request(address, "GET", "/health", None, {}).status == 200, "the second is found")
        with streaming(address, "/v1/completions", ENDLESS) as stream:
            assert shown() == {second: 1}
            listed.write_text(f"{cluster.address}\n")
            eventually(lambda: shown() == {cluster.address: 0}, "the second has vanished, the first is there")
            assert post(address, "/v1/completions", COMPLETION).status == 200
            assert stream.recv(1 << 16), "what runs goes on"
    cluster.processes.pop("following").stop()


def test_a_gateway_that_is_stopped_lets_its_streams_end(cluster: GatewayCluster) -> None:
    address = cluster.start_gateway("stopping", cluster.address, free_port())
    texts: list[str] = []
    begun = threading.Event()

    def read() -> None:
        stream = openai_at(address).completions.create(
            model="", prompt="a", seed=1, max_tokens=WHOLE, stream=True, extra_body={"ignore_eos": True}
        )
        for chunk in stream:
            texts.append(chunk.choices[0].text)
            begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(20)
    cluster.processes["stopping"].signal(signal.SIGTERM)
    reader.join(20)
    assert not reader.is_alive()
    assert cluster.processes["stopping"].wait(20) == 0
    whole = cluster.post("/v1/completions", COMPLETION | {"max_tokens": WHOLE, "ignore_eos": True})
    assert "".join(texts) == json.loads(whole.content)["choices"][0]["text"]
    cluster.processes.pop("stopping").stop()


def test_a_gateway_that_is_killed_frees_its_sessions(cluster: GatewayCluster) -> None:
    address = cluster.start_gateway("killed", cluster.address, free_port())
    with streaming(address, "/v1/completions", ENDLESS | {"n": 2}):
        eventually(lambda: cluster.status("target").sessions == 2, "both samples run")
        cluster.kill("killed")
        cluster.wait_idle()
    assert cluster.post("/v1/completions", COMPLETION).status == 200
    cluster.processes.pop("killed").stop()


def test_a_gateway_that_drains_refuses_connections_and_cuts_off_what_is_left(cluster: GatewayCluster) -> None:
    port = free_port()
    settings: Flags = {"model": MODEL, "coordinator.address": cluster.address, "server.port": port}
    cluster.start("draining", "gateway", settings | {"server.drain_seconds": 1.0})
    cluster.await_serving("draining")
    address = cluster.address_of("draining")
    with streaming(address, "/v1/completions", ENDLESS):
        cluster.processes["draining"].signal(signal.SIGTERM)
        eventually(lambda: not _takes_connections(port), "no new connection is taken")
        assert cluster.processes["draining"].exit_code is None, "the stream still runs"
        assert cluster.processes["draining"].wait(20) == 0
    cluster.wait_idle()
    cluster.processes.pop("draining").stop()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system drops no connection for us")
def test_a_reader_that_takes_nothing_loses_its_connection(cluster: GatewayCluster) -> None:
    """A whole reply is written at once: only the system knows that nobody takes it."""
    port = free_port()
    settings: Flags = {"model": MODEL, "coordinator.address": cluster.address, "server.port": port}
    cluster.start("strict", "gateway", settings | {"reader_timeout_s": 0.5})
    cluster.await_serving("strict")
    process = psutil.Process(cluster.processes["strict"].pid)
    body = json.dumps(COMPLETION | {"max_tokens": 3000, "ignore_eos": True, "logprobs": 20}).encode()
    with socket.socket() as idle:
        idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        idle.connect(("127.0.0.1", port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        idle.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        eventually(lambda: _connections(process, port) == 1, "it is connected")
        eventually(lambda: select.select([idle], [], [], 0)[0] != [], "the reply is written")
        eventually(lambda: _connections(process, port) == 0, "its connection is dropped")
    cluster.processes.pop("strict").stop()


def _connections(process: psutil.Process, port: int) -> int:
    return sum(each.laddr.port == port and bool(each.raddr) for each in process.net_connections("tcp"))


def _takes_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
