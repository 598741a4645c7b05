"""Two coordinators before one target: a text outlives the one that made it, and requests go to those that serve."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from paceline.local.service_process import Flags
from tests.e2e.cluster import eventually
from tests.gateway.gateways import GatewayCluster, endless_text, post, request

SHORT: dict[str, Any] = {"prompt": "a", "max_tokens": 5, "seed": 1}
LENGTH = 1000
LONG_TEXT: dict[str, Any] = {"prompt": "a", "max_tokens": LENGTH, "seed": 1, "ignore_eos": True}
"""A second or more of rounds: longer than it takes to kill its coordinator."""
LABELS: tuple[str, ...] = ("coordinator", "second")


class TwoCoordinators(GatewayCluster):
    """`coordinator` and `second`, and a gateway that knows both."""

    def start_all(self) -> None:
        self.start("target", "target", self._settings("target"))
        self.await_serving("target")
        for label in LABELS:
            self.start(label, "coordinator", self.coordinator_flags() | {"reconnect_max_ms": 200.0})
        self.await_serving(*LABELS)
        for label in LABELS:
            self.await_links(label)
        self.start_gateway("gateway", self.http_port, self.both() | {"coordinator_wait_ms": 2000.0})

    def both(self) -> Flags:
        """A gateway's flag that names them."""
        return {"coordinator.address": [self.address, self.address_of("second")]}

    def again(self, label: str) -> None:
        self.start_again(label)
        self.await_serving(label)
        self.await_links(label)

    def requests(self) -> dict[str, int]:
        shown = {each["address"]: each["requests"] for each in self.get("/cluster").json["coordinators"]}
        return {label: shown[self.address_of(label)] for label in LABELS}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoCoordinators]:
    with TwoCoordinators(tmp_path_factory.mktemp("two")) as running:
        yield running


@pytest.mark.parametrize(
    "fields", [pytest.param({}, id="one"), pytest.param({"n": 2}, id="samples", marks=pytest.mark.full)]
)
def test_a_text_goes_on_at_the_other_coordinator(cluster: TwoCoordinators, fields: dict[str, Any]) -> None:
    whole = cluster.post("/v1/completions", LONG_TEXT | fields).json["choices"]
    stream = endless_text(cluster.address_of("gateway"), max_tokens=LENGTH, **fields)
    texts = dict.fromkeys(range(len(whole)), "")
    reasons: list[str] = []
    killed = ""
    for chunk in stream:
        choice = chunk.choices[0]
        texts[choice.index] += choice.text
        reasons += [choice.finish_reason] if choice.finish_reason else []
        if not killed and all(texts.values()):
            eventually(lambda: sum(cluster.requests().values()) == len(whole), "all choices run")
            killed = next(label for label, count in cluster.requests().items() if count)
            cluster.kill(killed)
    assert killed
    assert reasons == ["length"] * len(whole)
    assert texts == {choice["index"]: choice["text"] for choice in whole}
    began = time.monotonic()
    assert cluster.post("/v1/completions", SHORT).status == 200, "the next request goes to the other"
    assert time.monotonic() - began < 2.0
    cluster.again(killed)


def test_no_coordinator_is_503_at_once_or_at_the_end_of_a_stream_until_one_is_back(cluster: TwoCoordinators) -> None:
    with cluster.further_gateway("hasty", cluster.both() | {"coordinator_wait_ms": 200.0}) as address:
        stream = endless_text(address)
        next(stream)
        for label in LABELS:
            cluster.kill(label)
        with pytest.raises(openai.APIError) as caught:
            list(stream)
        assert caught.value.type == "service_unavailable_error"
        for path, body in (
            ("/v1/completions", SHORT),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/v1/responses", {"input": "a"}),
            ("/v1/messages", {"model": "", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}),
        ):
            answer = post(address, path, body)
            assert answer.status == 503, answer.content
            assert int(answer.headers["retry-after"]) >= 1
        assert answer.json["error"]["type"] == "overloaded_error"
        for path in ("/health", "/v1/models"):
            answer = request(address, "GET", path, None, {})
            assert (answer.status, answer.error["type"]) == (503, "service_unavailable_error")
        assert request(address, "GET", "/ping", None, {}).status == 200
        cluster.again("second")
        eventually(lambda: post(address, "/v1/completions", SHORT).status == 200, "one is enough")
        cluster.again("coordinator")
