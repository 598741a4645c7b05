"""API keys over real gRPC: refused alike, limited by name, revoked while requests run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.access.gate import REFUSAL, REVOCATION
from paceline.access.keys import KeyLimits, hash_of, new_key
from paceline.client import (
    Client,
    GenerateRequest,
    Overloaded,
    PacelineError,
    SpeculationSettings,
    Tokens,
    Unauthenticated,
)
from tests.e2e.cluster import Cluster, eventually
from tests.e2e.keys import write_keys

SLOW = "table:vocab=64,seed=1,step_ms=20,max_length=4096"
KEYS = {name: new_key() for name in ("alice", "bob", "small")}
LIMITS = {"small": KeyLimits(tokens_per_minute=20)}
ENDLESS = GenerateRequest(token_ids=(1, 2, 3), max_new_tokens=4000, seed=5, speculation=SpeculationSettings(off=True))
SHORT = GenerateRequest(token_ids=(1, 2, 3), max_new_tokens=4, seed=5)


def save(file: Path, *names: str) -> None:
    write_keys(file, {name: KEYS[name] for name in names}, LIMITS)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.json"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, file: Path) -> Iterator[Cluster]:
    save(file, *KEYS)
    cluster = Cluster(tmp_path_factory.mktemp("guarded"), SLOW, (), coordinator_flags={"api_keys": str(file)})
    cluster.api_key = KEYS["alice"]
    with cluster:
        yield cluster


def client_of(cluster: Cluster, name: str) -> Client:
    return Client(cluster.address, api_key=KEYS[name], timeout_s=60)


def tokens_of(events: Iterable[object]) -> list[int]:
    return [token for event in events if isinstance(event, Tokens) for token in event.token_ids]


def refusal(client: Client, request: GenerateRequest = SHORT) -> PacelineError:
    with client, pytest.raises(PacelineError) as caught:
        client.generate(request)
    return caught.value


def test_without_one_of_its_keys_the_coordinator_says_nothing_but_that_it_serves(guarded: Cluster) -> None:
    for key in (None, "pl-wrong", hash_of(KEYS["alice"]), "x" * 1024):
        with Client(guarded.address, api_key=key, wait_ready=30, timeout_s=20) as client:
            with pytest.raises(Unauthenticated) as asked:
                client.describe_models()
            with pytest.raises(Unauthenticated) as sent:
                client.generate(SHORT)
        assert asked.value.message == sent.value.message == REFUSAL
    with grpc.insecure_channel(guarded.address) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_tokens_of_prompt_and_text_are_counted(guarded: Cluster) -> None:
    small = GenerateRequest(token_ids=(1,) * 8, max_new_tokens=16, seed=5)
    with client_of(guarded, "small") as client:
        assert len(client.generate(small).token_ids) == 16
    error = refusal(client_of(guarded, "small"))
    assert isinstance(error, Overloaded)
    assert error.metadata == {"limit": "tokens_per_minute", "value": "20"}
    # 8 + 16 - 20 tokens are owed, and one is wanted; those that came meanwhile are paid.
    assert 9_000 <= (error.retry_after_ms or 0) <= 15_000


def test_a_revoked_key_ends_its_streams_and_no_others(guarded: Cluster, file: Path) -> None:
    """The last test of these services: keys are missing behind it."""
    with client_of(guarded, "alice") as alice, client_of(guarded, "bob") as bob:
        others: Any = bob.stream(ENDLESS)
        ours = alice.stream(ENDLESS)
        whole = [next(others) for _ in range(2)]
        received = [next(ours) for _ in range(3)]
        save(file, "bob")
        with pytest.raises(Unauthenticated) as caught:
            received.extend(ours)
        assert caught.value.message == REVOCATION
        beginning = tokens_of(received)
        while len(tokens_of(whole)) <= len(beginning):
            whole.append(next(others))
        assert beginning
        assert tokens_of(whole)[: len(beginning)] == beginning
        eventually(lambda: guarded.status("target").sessions == 1, "the revoked stream's session is freed")
        assert refusal(client_of(guarded, "alice")).message == REFUSAL
        next(others)
        others.close()
    with client_of(guarded, "bob") as client:
        assert client.generate(SHORT).token_ids
    eventually(lambda: guarded.status("target").sessions == 0, "nothing is held")
