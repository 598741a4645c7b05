"""What follows from the settings, and when the ranks of a target begin, without a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.local.service_process import ServiceFailed
from paceline.protocol.errors import InvalidInput
from paceline_ray.controller import placement_order
from paceline_ray.deployed_service import DeployedService, RankActor
from paceline_ray.deployments import RunningDeployment
from paceline_ray.placement import missing_resources, role_and_index, strategy_for
from paceline_ray.records import ActorReport, ActorState, ActorStatus, Deployment, ServiceNeeds, ServicePlan
from paceline_ray.settings import ConfigFiles, RaySettings, plan_deployment

TABLE = "table:vocab=300"
MODEL = "smollm2-135m"
NO_FILES = ConfigFiles()


def plan(files: ConfigFiles = NO_FILES, *, gpus: bool = True, **fields: Any) -> Deployment:
    return plan_deployment(RaySettings(**({"model": MODEL} | fields)), files, cluster_has_gpus=gpus)


def engine(deployment: Deployment, role: Any) -> dict[str, object]:
    section = deployment.plans[role].settings["engine"]
    assert isinstance(section, dict)
    return section


def test_each_service_gets_the_devices_that_it_needs() -> None:
    """A rank a GPU where there are some, a draft its share, or a resource of one's own."""
    deployment = plan(tensor_parallel_size=2, target_cpus=4, draft_gpus=0.25, gpu_memory_utilization=0.8)
    needs = deployment.plans["target"].needs
    assert (needs.bundle, needs.ranks) == ({"CPU": 4.0, "GPU": 1.0}, 2)
    assert "device" not in engine(deployment, "target")
    assert engine(deployment, "target")["gpu_memory_utilization"] == 0.8
    assert deployment.plans["draft"].needs.gpus == 0.25
    assert engine(deployment, "draft")["gpu_memory_utilization"] == pytest.approx(0.9 * 0.25)
    own = plan(draft_resource="small_gpu=2")
    assert own.plans["draft"].needs.bundle == {"CPU": 0.5, "small_gpu": 2.0}
    assert "device" not in engine(own, "draft")


def test_files_give_what_flags_leave_open(tmp_path: Path) -> None:
    file = tmp_path / "target.toml"
    file.write_text("max_queue = 7\nengine.threads = 3\nengine.max_num_seqs = 5\n")
    deployment = plan(ConfigFiles(target=file), max_num_seqs=9, target_cpus=8)
    assert deployment.plans["target"].settings["max_queue"] == 7
    assert engine(deployment, "target")["threads"] == 3
    assert engine(deployment, "target")["max_num_seqs"] == 9


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"draft_resource": "small_gpu"}, "draft_resource = 'small_gpu': must be NAME=AMOUNT"),
        ({"draft_resource": "small_gpu=0"}, "draft_resource"),
        ({"name": "a/b"}, "name = 'a/b'"),
        ({"drain_seconds": 601}, "drain_seconds = 601"),
    ],
)
def test_settings_are_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        plan(**fields)
    assert named in refused.value.message


def hosts(deployment: Deployment) -> dict[str, object]:
    sections = {role: each.settings.get("server", {}) for role, each in deployment.plans.items()}
    return {role: each.get("host") for role, each in sections.items() if isinstance(each, dict)}


def test_a_new_local_cluster_is_for_this_machine_and_another_for_its_nodes() -> None:
    roles = ("target", "coordinator", "gateway", "draft")
    here, opened = (
        plan_deployment(RaySettings(model=MODEL, **host), NO_FILES, cluster_has_gpus=False, on_one_machine=True)
        for host in ({}, {"host": "0.0.0.0"})
    )
    assert hosts(here) == dict.fromkeys(roles, "127.0.0.1")
    assert hosts(plan()) == dict.fromkeys(roles)
    assert hosts(opened) == hosts(here) | dict.fromkeys(("coordinator", "gateway"), "0.0.0.0")


def test_one_service_of_each_role_looks_for_room_before_a_second_one() -> None:
    order = placement_order(plan(targets=2, drafts=2))
    assert order == ["target-0", "coordinator-0", "gateway-0", "draft-0", "target-1", "draft-1"]


@pytest.mark.parametrize(
    ("needs", "free", "text"),
    [
        (ServiceNeeds(0.5), {}, "0.5 CPU: the cluster has 0 free"),
        (ServiceNeeds(2.0, ranks=2), {"CPU": 3.0}, "2 times 2 CPU: the cluster has 3 free"),
        (ServiceNeeds(1.0), {"CPU": 1.5}, "1 CPU: the cluster has 1.5 free, but not together"),
        (ServiceNeeds(1.0, 0.5), {"CPU": 4.0}, "1 CPU and 0.5 GPU: the cluster has 4 CPU and 0 GPU free"),
    ],
)
def test_what_a_service_waits_for_is_told_beside_what_is_free(
    needs: ServiceNeeds, free: dict[str, float], text: str
) -> None:
    assert missing_resources(needs, free) == text


def awaited(monkeypatch: pytest.MonkeyPatch, states: dict[str, str], *, cluster_may_grow: bool = True) -> list[str]:
    """What `await_serving` tells of, if it returns before its time is over."""
    running = RunningDeployment("some", None)
    lines = [ActorStatus(name, role_and_index(name.replace("_", "-"))[0], state) for name, state in states.items()]
    monkeypatch.setattr(running, "status", lambda: lines)
    told: list[str] = []
    running.await_serving(0.0, lambda line: told.append(line.name), cluster_may_grow=cluster_may_grow)
    return told


SERVING = {"target_0": "serving", "coordinator_0": "serving", "gateway_0": "serving"}


@pytest.mark.parametrize("more", [{"draft_0": "without room"}, {"draft_0": "serving", "target_1": "without room"}])
def test_a_deployment_is_up_without_what_it_can_do_without(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, str]
) -> None:
    assert awaited(monkeypatch, SERVING | more) == [*SERVING, *more]


@pytest.mark.parametrize(
    "more",
    [{"draft_0": "loading"}, {"coordinator_0": "without room"}, {"draft_0": "without room", "draft_1": "starting"}],
)
def test_what_is_needed_or_comes_is_waited_for(monkeypatch: pytest.MonkeyPatch, more: dict[str, str]) -> None:
    with pytest.raises(ServiceFailed, match=f"not serving after 0 s: {list(more)[-1]} is"):
        awaited(monkeypatch, SERVING | more)


def test_a_cluster_that_cannot_grow_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServiceFailed, match="no room: coordinator_0 is without room"):
        awaited(monkeypatch, SERVING | {"coordinator_0": "without room"}, cluster_may_grow=False)


def test_ranks_span_nodes_only_where_one_is_too_small() -> None:
    def strategy(ranks: int, *nodes: tuple[float, float]) -> str:
        free = [{"CPU": cpus, "GPU": gpus} for cpus, gpus in nodes]
        return strategy_for(ServiceNeeds(cpus=1.0, gpus=1.0, ranks=ranks), free)

    assert strategy(2, (8, 1), (8, 2)) == "STRICT_PACK"
    assert strategy(2, (8, 1), (8, 1)) == "PACK"
    assert strategy(4, (8, 2), (2, 4)) == "PACK"


class FakeRanks:
    """A target of two ranks whose processes are what the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ended: list[str] = []
        needs = ServiceNeeds(cpus=1.0, ranks=2)
        service = ServicePlan(settings={}, needs=needs, drain_seconds=1.0, count=1)
        self.group = DeployedService("target-0", "target", service, {"rank-0": None, "rank-1": None}, None)

        def end_process(actor: RankActor) -> None:
            self.ended.append(actor.name)
            actor.is_lost = True

        monkeypatch.setattr(RankActor, "end_process", end_process)

    def report(self, rank: int, incarnation: str, state: ActorState = ActorState.WAITING, address: str = "") -> None:
        """A rank reports; one that runs does so with the meeting of now."""
        rendezvous = None if state is ActorState.WAITING else self.group.rendezvous
        actor = self.group.actors[rank]
        actor.report = ActorReport(
            incarnation, state, "10.0.0.1", 1, free_port=7000 + rank, address=address, rendezvous=rendezvous
        )
        actor.is_lost = False

    def reconcile(self) -> tuple[str, ...] | None:
        """The incarnations that are to begin or run together."""
        self.group.reconcile(may_begin=True)
        return None if self.group.rendezvous is None else self.group.rendezvous.incarnations


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> FakeRanks:
    """They begin when all are there."""
    ranks = FakeRanks(monkeypatch)
    ranks.report(0, "a")
    assert ranks.reconcile() is None
    ranks.report(1, "b")
    assert ranks.reconcile() == ("a", "b")
    assert ranks.group.rendezvous is not None
    assert (ranks.group.rendezvous.host, ranks.group.rendezvous.port) == ("10.0.0.1", 7000)
    return ranks


def both_run(ranks: FakeRanks) -> None:
    ranks.report(0, "a", ActorState.SERVING, "10.0.0.1:4000")
    ranks.report(1, "b", ActorState.SERVING)
    assert ranks.reconcile() == ("a", "b")
    assert ranks.ended == []


@pytest.mark.parametrize(("lost", "again"), [(0, ("c", "d")), (1, ("d", "c"))])
def test_a_new_rank_ends_the_one_that_runs_and_both_begin_anew(
    ranks: FakeRanks, lost: int, again: tuple[str, str]
) -> None:
    both_run(ranks)
    ranks.report(lost, "c")
    assert ranks.reconcile() is None
    assert ranks.ended == [f"rank-{1 - lost}"]
    ranks.report(1 - lost, "d")
    assert ranks.reconcile() == again
    assert ranks.group.rendezvous is not None
    assert ranks.group.rendezvous.serving_port == 4000, "it serves where it did"


def test_a_rank_that_began_with_a_dead_one_is_ended(ranks: FakeRanks) -> None:
    first = ranks.group.rendezvous
    ranks.report(1, "c")  # b died before it began
    assert ranks.reconcile() == ("a", "c")
    late = ActorReport("a", ActorState.LOADING, "10.0.0.1", 1, rendezvous=first)
    ranks.group.actors[0].report = late
    ranks.reconcile()
    assert ranks.ended == ["rank-0"]


def test_a_new_controller_adopts_what_runs(ranks: FakeRanks) -> None:
    both_run(ranks)
    rendezvous = ranks.group.rendezvous
    ranks.group.rendezvous = None
    ranks.group.reconcile(may_begin=True)
    assert ranks.group.rendezvous == rendezvous
    assert ranks.ended == []


def coordinator(serving_port: int) -> DeployedService:
    plan = ServicePlan({}, ServiceNeeds(cpus=0.5), drain_seconds=1.0, count=1, serving_port=serving_port)
    service = DeployedService("coordinator-0", "coordinator", plan, {"rank-0": None}, None)
    service.actors[0].report = ActorReport("a", ActorState.WAITING, "10.0.0.1", 1)
    return service


@pytest.mark.parametrize(
    ("claims", "port"), [((), 50051), (("10.0.0.2:50051",), 50051), (("10.0.0.1:50051", "10.0.0.1:0"), 0)]
)
def test_one_coordinator_of_a_node_gets_the_port(claims: tuple[str, ...], port: int) -> None:
    service = coordinator(50051)
    service.reconcile(may_begin=True, claims=set(claims))
    assert service.rendezvous is not None
    assert service.rendezvous.serving_port == port
    assert service.claim == f"10.0.0.1:{port}"


def test_a_service_comes_back_to_its_port_whatever_address_it_listens_on() -> None:
    service = coordinator(0)
    service.reconcile(may_begin=True)
    began = service.rendezvous
    service.actors[0].report = ActorReport("a", ActorState.SERVING, "10.0.0.1", 1, 0, "127.0.0.1:4000", began)
    service.reconcile(may_begin=True)
    service.actors[0].report = ActorReport("b", ActorState.WAITING, "10.0.0.1", 2)
    service.reconcile(may_begin=True)
    assert service.rendezvous is not None
    assert (service.rendezvous.incarnations, service.rendezvous.serving_port) == (("b",), 4000)


def test_nothing_begins_before_it_may() -> None:
    service = coordinator(50051)
    service.reconcile(may_begin=False)
    assert service.rendezvous is None
