"""Two coordinators before one target: a text outlives the one that made it, and requests go to those that serve."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import openai
import pytest

from paceline.client import Client
from paceline.local.service_process import Flags
from tests.e2e.cluster import eventually, free_port
from tests.gateway.gateways import LONG, WAIT_S, GatewayCluster, endless_text, post, request

SHORT: dict[str, Any] = {"prompt": "a", "max_tokens": 5, "seed": 1}
LENGTH = 1000
LONG_TEXT: dict[str, Any] = {"prompt": "a", "max_tokens": LENGTH, "seed": 1, "ignore_eos": True}
"""A second or more of rounds: longer than it takes to kill its coordinator."""
PLACES = {"coordinator": 1, "second": 2}


class TwoCoordinators(GatewayCluster):
    """`coordinator` and `second`, and a gateway that knows both."""

    def start_all(self) -> None:
        self.start("target", "target", self._settings("target"))
        self.await_serving("target")
        for label, places in PLACES.items():
            limits: Flags = {"reconnect_max_ms": 200.0, "max_concurrent_requests": places}
            self.start(label, "coordinator", self.coordinator_flags() | limits)
        self.await_serving(*PLACES)
        for label in PLACES:
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
        return {label: shown[self.address_of(label)] for label in PLACES}


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


def test_a_coordinator_that_has_just_gone_costs_no_request(cluster: TwoCoordinators) -> None:
    """Its description is known for a while: a request that was sent to it all the same goes on at the other."""
    choices = cluster.post("/v1/completions", SHORT).json["choices"]
    cluster.kill("coordinator")
    for _ in range(3):
        answer = cluster.post("/v1/completions", SHORT)
        assert (answer.status, answer.json["choices"]) == (200, choices)
    cluster.again("coordinator")


@contextmanager
def filled(cluster: TwoCoordinators, label: str) -> Iterator[None]:
    """A coordinator whose places others have taken than this gateway: it can't know before it asks."""
    with ExitStack() as open_:
        clients = [open_.enter_context(Client(cluster.reach(label))) for _ in range(PLACES[label])]
        running = [each.stream(token_ids=(97,), max_new_tokens=LONG, ignore_eos=True) for each in clients]
        for each in running:
            next(each)
        yield


def test_a_request_goes_to_the_coordinator_that_has_room(cluster: TwoCoordinators) -> None:
    def room() -> bool:
        return cluster.post("/v1/completions", SHORT | {"n": 3}).status == 200

    eventually(room, "all places are free")
    choices = cluster.post("/v1/completions", SHORT).json["choices"]
    with filled(cluster, "coordinator"):
        answers = [cluster.post("/v1/completions", SHORT) for _ in range(3)]
        assert [(each.status, each.json["choices"]) for each in answers] == [(200, choices)] * 3
        assert cluster.post("/v1/completions", SHORT | {"stream": True}).content.endswith(b"data: [DONE]\n\n")
        with filled(cluster, "second"):
            for streamed in (False, True):
                refused = cluster.post("/v1/completions", SHORT | {"stream": streamed})
                assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
                assert int(refused.headers["retry-after"]) == 1
        eventually(lambda: cluster.post("/v1/completions", SHORT).status == 200, "the second has room again")
    eventually(room, "all places are free again")


def test_no_coordinator_is_503_at_once_or_at_the_end_of_a_stream_until_one_is_back(cluster: TwoCoordinators) -> None:
    with cluster.further_gateway("hasty", cluster.both() | {"coordinator_wait_ms": 200.0}) as address:
        stream = endless_text(address)
        next(stream)
        for label in PLACES:
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


def test_a_coordinator_without_a_target_is_passed_over(cluster: TwoCoordinators) -> None:
    nowhere: Flags = {"target.address": f"127.0.0.1:{free_port()}"}
    cluster.start("alone", "coordinator", cluster.coordinator_flags() | nowhere)
    cluster.await_serving("alone")
    both = [cluster.address_of("alone"), cluster.address]
    with cluster.further_gateway("choosing", {"coordinator.address": both}) as address:
        began = time.monotonic()
        assert [post(address, "/v1/completions", SHORT).status for _ in range(3)] == [200] * 3
        assert time.monotonic() - began < WAIT_S / 4
        shown = request(address, "GET", "/cluster", None, {}).json["coordinators"]
        assert [each["models"][0]["peers"][0]["up"] for each in shown] == [False, True]
    cluster.processes.pop("alone").stop()
