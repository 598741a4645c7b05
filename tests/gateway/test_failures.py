"""What fails behind the gateway is told as an error of its kind, and the next request works."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from paceline.local.service_process import Flags
from tests.e2e.cluster import eventually
from tests.gateway.gateways import LONG, GatewayCluster, endless_text, post, request, streaming

COMPLETION: dict[str, Any] = {"prompt": "a", "max_tokens": 5, "seed": 1}
WHOLE = 800
"""Tokens of a text that runs for some tenths of a second."""
ENDLESS = COMPLETION | {"max_tokens": LONG, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayCluster]:
    folder = tmp_path_factory.mktemp("failing")
    flags: Flags = {"coordinator_wait_ms": 300.0, "server.drain_seconds": 20.0}
    with GatewayCluster(folder, flags) as running:
        yield running


def test_a_target_that_is_gone_is_503_until_it_is_back(cluster: GatewayCluster) -> None:
    cluster.kill("target")
    eventually(lambda: cluster.get("/health").status == 503, "the target is missed")
    answer = cluster.post("/v1/completions", COMPLETION)
    assert (answer.status, "target" in answer.error["message"]) == (503, True)
    cluster.restart("target")
    eventually(lambda: cluster.get("/health").status == 200, "healthy again")
    assert cluster.post("/v1/completions", COMPLETION).status == 200


def test_coordinators_are_those_of_a_file_and_a_vanished_ones_streams_go_on(
    cluster: GatewayCluster, tmp_path: Path
) -> None:
    """As DNS names them, which the same class asks."""
    listed = tmp_path / "coordinators"
    listed.write_text("")

    def shown() -> dict[str, int]:
        view = request(address, "GET", "/cluster", None, {}).json["coordinators"]
        return {each["address"]: each["requests"] for each in view}

    with (
        cluster.further_gateway("following", {"coordinator.address": f"file:{listed}"}) as address,
        ExitStack() as stack,
    ):
        answer = post(address, "/v1/completions", COMPLETION)
        assert (answer.status, str(listed) in answer.error["message"]) == (503, True)
        second = stack.enter_context(cluster.coordinator("second", {}))
        listed.write_text(f"{second}\n")
        eventually(lambda: request(address, "GET", "/health", None, {}).status == 200, "the second is found")
        with streaming(address, "/v1/completions", ENDLESS) as stream:
            assert shown() == {second: 1}
            listed.write_text(f"{cluster.address}\n")
            eventually(lambda: shown() == {cluster.address: 0}, "the second has vanished, the first is there")
            assert post(address, "/v1/completions", COMPLETION).status == 200
            assert stream.recv(1 << 16), "what runs goes on"


@pytest.mark.full  # `test_connections` has a gateway that is cancelled
def test_a_gateway_that_is_stopped_lets_its_streams_end(cluster: GatewayCluster) -> None:
    texts: list[str] = []
    begun = threading.Event()

    def read(address: str) -> None:
        for chunk in endless_text(address, max_tokens=WHOLE):
            texts.append(chunk.choices[0].text)
            begun.set()

    with cluster.further_gateway("stopping") as address:
        reader = threading.Thread(target=read, args=(address,))
        reader.start()
        assert begun.wait(20)
        cluster.processes["stopping"].signal(signal.SIGTERM)
        reader.join(20)
        assert not reader.is_alive()
        assert cluster.processes["stopping"].wait(20) == 0
    whole = cluster.post("/v1/completions", COMPLETION | {"max_tokens": WHOLE, "ignore_eos": True})
    assert "".join(texts) == whole.json["choices"][0]["text"]


def test_a_gateway_that_drains_refuses_connections_and_cuts_off_what_is_left(cluster: GatewayCluster) -> None:
    with (
        cluster.further_gateway("draining", {"server.drain_seconds": 1.0}) as address,
        streaming(address, "/v1/completions", ENDLESS),
    ):
        cluster.processes["draining"].signal(signal.SIGTERM)
        eventually(lambda: not _takes_connections(address), "no new connection is taken")
        assert cluster.processes["draining"].exit_code is None, "the stream still runs"
        assert cluster.processes["draining"].wait(20) == 0
    cluster.wait_idle()


def _takes_connections(address: str) -> bool:
    try:
        socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=1).close()
    except OSError:
        return False
    return True
