"""A deployment on a Ray cluster of two nodes: the text, killed actors, scaling, refusals, its end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import grpc
import psutil
import pytest

from paceline.client import AsyncClient, Client
from paceline.engine.table.engine import TableModel
from paceline.models.table_names import TableSpec
from paceline.protocol.generation import Finished, GenerateRequest, Provenance, SpeculationSettings, Tokens
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.rpc.link_kinds import service_status
from tests.e2e.cluster import eventually
from tests.ray.driving import BACK_SECONDS, ENVIRONMENT, RAY, Deployed, TwoNodes, controller_pids, two_nodes
from tests.ray.test_vllm import FILE as VLLM
from tests.ray.two_nodes import CPUS_OF_A_NODE
from tests.services.expected import own_tokens

pytestmark = pytest.mark.timeout(300)

TARGET = "table:vocab=300,seed=1,eos=299,step_ms=4"
DRAFT = "model:table:vocab=300,seed=1,eos=299,noise=0.2,step_ms=1"
WAIT = ("--wait-seconds", "90")
PORTS = ("--port", "0", "--http-port", "0")
DRAFTS = ("--drafter", DRAFT, "--drafts", "2", "--draft-resource", "small=5")
UP = (TARGET, *DRAFTS, *PORTS, "--target-cpus", "0.5", *WAIT)
"""One node has 8 of `small`: one draft finds room."""
LACK = "1 of 2 draft services waits for 0.5 CPU and 5 small: the cluster has 6.5 CPU and 3 small free"
LENGTH = 160
SEED = 23
CLIENTS = 4
TAKES_SESSIONS_S = 10.0
STANDS_IN = """#!/bin/sh
echo "$(basename "$0") $* pid $$" >> {notes}
test "$(basename "$0")" = vllm || exec sleep 100
"""


def request(length: int = LENGTH, client: int = 0) -> GenerateRequest:
    return GenerateRequest(
        token_ids=(10 + client, 200, 30),
        seed=SEED,
        max_new_tokens=length,
        ignore_eos=True,
        speculation=SpeculationSettings(num_draft_tokens=3),
    )


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of programs that note what they were told: vLLM's ends at once, the draft's would go on."""
    folder = tmp_path_factory.mktemp("programs")
    for name in ("vllm", "paceline"):
        (folder / name).write_text(STANDS_IN.format(notes=folder / "notes"))
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def nodes(stand_ins: Path) -> Iterator[TwoNodes]:
    with two_nodes(stand_ins) as running:
        yield running


@pytest.fixture(scope="module")
def deployed(nodes: TwoNodes) -> Iterator[Deployed]:
    deployed = Deployed(nodes)
    deployed.said = deployed.do("up", *UP)
    try:
        yield deployed
    finally:
        deployed.do("down")


def text_of(client: int) -> tuple[int, ...]:
    """A client's text by the target's law alone; longer ones begin with it."""
    law, prompt = TableModel(TableSpec.parse(TARGET)).logits, request(client=client).token_ids
    return tuple(own_tokens(prompt, LENGTH, NoiseKey(SEED), SamplingParams(), law))


@pytest.fixture(scope="module")
def plain() -> tuple[int, ...]:
    return text_of(0)


def sessions_of(address: str) -> int:
    try:
        return service_status("draft", address).sessions
    except grpc.RpcError:
        return 0


def over_http(address: str) -> tuple[int, ...]:
    """What a gateway answers to the first client's request."""
    asked = {"prompt": [10, 200, 30], "seed": SEED, "max_tokens": LENGTH, "ignore_eos": True}
    asked["return_token_ids"] = True
    made = urllib.request.Request(f"http://{address}/v1/completions", json.dumps(asked).encode())
    made.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(made, timeout=60) as answer:
        return tuple(json.load(answer)["choices"][0]["token_ids"])


def test_what_finds_no_room_keeps_nobody_waiting(deployed: Deployed) -> None:
    serving = ("target-0", "draft-0", "coordinator-0", "gateway-0")
    states = {f"{each}/rank-0": "serving" for each in serving} | {"draft-1/rank-0": "without room"}
    eventually(
        lambda: {line["name"].removeprefix("paceline/"): line["state"] for line in deployed.lines()} == states,
        "all that has room serves",
    )
    assert LACK in deployed.said
    assert f"--coordinator {deployed.line('coordinator-0')['address']}" in deployed.said
    assert f"OpenAI's API: http://{deployed.line('gateway-0')['address']}/v1" in deployed.said


def test_the_text_is_that_without_ray(deployed: Deployed, plain: tuple[int, ...]) -> None:
    lines = {line["role"]: line for line in json.loads(deployed.do("status", "--json"))}
    assert over_http(lines["gateway"]["address"]) == plain
    with Client(lines["coordinator"]["address"]) as client:
        eventually(lambda: all(m.draft_ready for m in client.describe_models()), "the draft is linked")
        generation = client.generate(request())
    assert generation.token_ids == plain
    assert Provenance.ACCEPTED in generation.provenance, "the draft takes part"


@pytest.mark.full
@pytest.mark.parametrize("service", ["draft-0", "target-0", "coordinator-0"])
async def test_an_actor_killed_in_mid_generation_comes_back(
    deployed: Deployed, plain: tuple[int, ...], service: str
) -> None:
    before = deployed.line(service)
    coordinator = deployed.line("coordinator-0")["address"]
    length = 600
    ids: list[int] = []
    async with AsyncClient(coordinator, resume_wait_s=BACK_SECONDS) as client:
        async for event in client.stream(request(length)):
            if isinstance(event, Tokens):
                if len(ids) < 40 <= len(ids) + len(event.token_ids):
                    deployed.kill(before)
                ids += event.token_ids
            elif isinstance(event, Finished):
                break
    assert tuple(ids[:LENGTH]) == plain
    assert len(ids) == length
    after = await asyncio.to_thread(deployed.await_back, service, before)
    assert after["restarts"] == before["restarts"] + 1
    assert after["address"] == before["address"], "nobody has to learn of a new endpoint"
    async with AsyncClient(coordinator) as client:
        assert (await client.generate(request())).token_ids == plain


def test_a_killed_controller_finds_its_actors_again(deployed: Deployed, plain: tuple[int, ...]) -> None:
    before = deployed.lines()
    (pid,) = controller_pids()
    os.kill(pid, signal.SIGKILL)

    def knows_all_again() -> bool:
        found = deployed.nodes.status(deployed.name)
        return isinstance(found, list) and [each["state"] for each in found] == [each["state"] for each in before]

    eventually(knows_all_again, "the new controller knows all", BACK_SECONDS)
    after = deployed.lines()
    assert [(each["name"], each["pid"]) for each in after] == [(each["name"], each["pid"]) for each in before]
    with Client(deployed.line("coordinator-0")["address"]) as client:
        assert client.generate(request()).token_ids == plain


@contextmanager
def load(coordinator: str, texts: list[tuple[int, ...]]) -> Iterator[list[bool]]:
    """Requests one after the other from several clients; yields whether each text was right."""
    outcomes: list[bool] = []
    enough = Event()

    def keep_asking(number: int) -> None:
        with Client(coordinator) as client:
            while not enough.is_set():
                outcomes.append(client.generate(request(client=number)).token_ids == texts[number])

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(keep_asking, number) for number in range(CLIENTS)]
        try:
            yield outcomes
        finally:
            enough.set()
        for each in clients:
            each.result()


@pytest.mark.full
def test_drafts_come_and_go_under_load(nodes: TwoNodes) -> None:
    growing, texts = Deployed(nodes, "growing"), [text_of(each) for each in range(CLIENTS)]
    assert len(set(texts)) == CLIENTS, "a comparison can fail"
    growing.do("up", TARGET, "--drafter", DRAFT, "--target-cpus", "0.5", "--port", "0", "--no-http", *WAIT)
    try:
        with load(growing.line("coordinator-0")["address"], texts) as outcomes:
            eventually(lambda: len(outcomes) >= CLIENTS, "requests run")
            growing.do("scale", "--drafts", "2")
            added = growing.line("draft-1")["address"]
            eventually(lambda: sessions_of(added) > 0, "the draft that was added has sessions", TAKES_SESSIONS_S)
            before = len(outcomes)
            growing.do("scale", "--drafts", "1")
            eventually(lambda: len(outcomes) >= before + 2 * CLIENTS, "requests go on")
        assert all(outcomes), f"{outcomes.count(False)} of {len(outcomes)} texts changed"
        assert growing.names_of("draft") == ["growing/draft-0/rank-0"]
        assert sessions_of(added) == 0
    finally:
        growing.do("down")


@pytest.mark.full
def test_what_a_service_refuses_is_told_and_nothing_stays(nodes: TwoNodes, deployed: Deployed) -> None:
    other = Deployed(nodes, "other")
    done = other.run("up", TARGET, "--drafter", "mtp", "--port", "0", "--target-cpus", "0.1")
    assert done.returncode != 0
    assert "other/draft-0/rank-0" in done.stderr
    assert "refused" in done.stderr
    assert other.run("status").returncode == 2


@pytest.mark.parametrize(
    ("command", "arguments", "error"),
    [
        ("up", (), "name = 'paceline': must be that of no running deployment"),
        ("scale", ("--coordinators", "0"), "coordinators = 0: must be in [1, 1024]"),
    ],
)
def test_bad_commands_are_refused(deployed: Deployed, command: str, arguments: tuple[str, ...], error: str) -> None:
    done = deployed.run(command, *arguments)
    assert done.returncode == 2
    assert error in done.stderr


@pytest.mark.full
def test_ray_places_a_draft_beside_vllm_and_ends_it_with_the_server(nodes: TwoNodes, stand_ins: Path) -> None:
    flags = ["--address", nodes.address, "--model", "M", "--degree", "0", "--draft-gpus", "0", "--draft-resource", ""]
    done = subprocess.run(
        [sys.executable, VLLM, *flags], capture_output=True, text=True, env=ENVIRONMENT, check=False
    )
    assert done.returncode == 0, done.stderr
    (draft, pid), (vllm, _) = (line.rsplit(" pid ", 1) for line in (stand_ins / "notes").read_text().splitlines())
    assert draft.startswith("paceline draft-service --target-model M ")
    node = done.stdout.partition("draft service at ")[2].partition(",")[0]
    assert f'"address": "{node}"' in vllm
    eventually(lambda: not psutil.pid_exists(int(pid)), "the draft has ended")


@pytest.mark.full
def test_a_new_local_cluster_serves_this_machine_what_finds_room() -> None:
    asked = ("--drafts", str(2 * (os.cpu_count() or 1)), "--port", "0", "--http-port", "0", *WAIT)
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "RAY_ADDRESS"}
    argv = [*RAY, "up", TARGET, "--drafter", DRAFT, *asked]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment) as running:
        assert running.stdout is not None
        lines = list(iter(running.stdout.readline, "Ctrl-C takes it down\n"))
        running.send_signal(signal.SIGINT)
        rest = running.stdout.read()
    said = "".join(lines)
    assert "paceline is down" in rest
    assert re.search(
        r"^[123] of \d+ draft services (waits|each wait) for 0.5 CPU: the cluster has 0 free$", said, re.M
    )
    assert re.search(r"^ready: .* --coordinator 127\.0\.0\.1:\d+$", said, re.M)
    assert re.search(r"^OpenAI's API: http://127\.0\.0\.1:\d+/v1$", said, re.M)


@pytest.mark.full
def test_ranks_over_two_nodes_write_the_text_of_one(
    nodes: TwoNodes, deployed: Deployed, plain: tuple[int, ...], tmp_path: Path
) -> None:
    patient = tmp_path / "coordinator.toml"
    patient.write_text("target_wait_ms = 120000.0\n")  # two processes that import torch
    half = f"{CPUS_OF_A_NODE / 2 + 0.1:g}"
    options = ("-tp", "2", "--target-cpus", half, "--drafter", "none", "--coordinator-cpus", "0.1", *PORTS)
    spread = Deployed(nodes, "spread")
    spread.do("up", TARGET, *options, "--coordinator-config", str(patient), *WAIT)
    try:
        before = [spread.line("target-0", rank) for rank in (0, 1)]
        with Client(spread.line("coordinator-0")["address"], wait_ready=20.0) as client:
            assert client.generate(request()).token_ids == plain
            spread.kill(before[1])
            assert client.generate(request()).token_ids == plain, "a lost rank ends no request"
        for rank in (0, 1):
            spread.await_back("target-0", before[rank], rank)
    finally:
        spread.do("down")
