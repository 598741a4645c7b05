"""Where Ray puts a service's processes, and the names by which they are found again.

Every actor is detached and named `DEPLOYMENT/ROLE-INDEX/rank-RANK` in the namespace `paceline`. Any process can list
what runs from the names alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import ray
import ray.util
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline.local.service_process import ProcessName
from paceline_ray.records import ServiceNeeds, ServicePlan
from paceline_ray.service_actor import ServiceActor

NAMESPACE = "paceline"
THREADS = 4
"""Threads of one actor: it answers a beat while its service drains."""
_ACTOR = re.compile(rf"(?P<service>({'|'.join(get_args(ProcessName))})-\d+)/rank-\d+")


def controller_name(deployment: str) -> str:
    """The actor name of a deployment's controller."""
    return f"{deployment}/controller"


def actor_name(deployment: str, service: str, rank: int) -> str:
    """The actor name of one process of a service."""
    return f"{deployment}/{service}/rank-{rank}"


def role_and_index(service: str) -> tuple[ProcessName, int]:
    """Role and index of a service from its name, such as `draft-1`."""
    role, _, index = service.rpartition("-")
    return next(name for name in get_args(ProcessName) if name == role), int(index)


def services_of(deployment: str) -> list[str]:
    """The services of a deployment that have an actor, such as `draft-1`."""
    matches = (_ACTOR.fullmatch(name.removeprefix(f"{deployment}/")) for name in _names(deployment))
    return sorted({match["service"] for match in matches if match})


def place(deployment: str, service: str, plan: ServicePlan) -> tuple[dict[str, Any], PlacementGroup | None]:
    """Create a service's actors, or find those that exist; returns before Ray has placed them.

    The group keeps its resources while a process is restarted, so that nothing else takes them.

    Returns:
        The actors' handles by name, in the order of ranks; their placement group, if they need resources.
    """
    role, _ = role_and_index(service)
    group = None
    if plan.needs.bundle:
        group = _find_group(deployment, service) or _make_group(deployment, service, plan.needs)
    actors = {}
    for rank in range(plan.needs.ranks):
        name = actor_name(deployment, service, rank)
        actor_class = ray.remote(ServiceActor).options(name=name, **_options(plan.needs, group, rank))
        actors[name] = actor_class.remote(role, rank, plan.settings, plan.drain_seconds)
    return actors, group


def remove(actors: Iterable[Any], group: PlacementGroup | None) -> None:
    """End actors for good, and release their resources."""
    for actor in actors:
        ray.kill(actor, no_restart=True)
    if group is not None:
        remove_placement_group(group)


def remove_leftovers(deployment: str) -> None:
    """End the services of a deployment that has lost its controller."""
    for service in services_of(deployment):
        names = (name for name in _names(deployment) if name.startswith(f"{deployment}/{service}/"))
        remove((ray.get_actor(name, namespace=NAMESPACE) for name in names), _find_group(deployment, service))


def is_unschedulable(group: PlacementGroup) -> bool:
    """Whether Ray has tried to place a group and lacked the resources."""
    return bool(placement_group_table(group)["stats"]["scheduling_state"] in ("NO_RESOURCES", "INFEASIBLE"))


def missing_resources(needs: ServiceNeeds, free: Mapping[str, float]) -> str:
    """What a service needs and what the cluster has, such as `0.5 CPU: the cluster has 0 free`."""
    bundle = needs.bundle
    one = " and ".join(f"{amount:g} {name}" for name, amount in bundle.items())
    demand = f"{needs.ranks} times {one}" if needs.ranks > 1 else one
    supply = " and ".join(f"{free.get(name, 0.0):g}{f' {name}' if len(bundle) > 1 else ''}" for name in bundle)
    enough = all(free.get(name, 0.0) >= amount * needs.ranks for name, amount in bundle.items())
    return f"{demand}: the cluster has {supply} free{', but not together' if enough else ''}"


def strategy_for(needs: ServiceNeeds, nodes: Sequence[Mapping[str, float]]) -> str:
    """STRICT_PACK where a node's resources hold all ranks, else PACK, which spans as few nodes as it can."""
    whole = {name: amount * needs.ranks for name, amount in needs.bundle.items()}
    fits = any(all(node.get(name, 0.0) >= amount for name, amount in whole.items()) for node in nodes)
    return "STRICT_PACK" if fits else "PACK"


def node_resources() -> list[Mapping[str, float]]:
    """The resources of each living node, used or not."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _names(deployment: str) -> list[str]:
    # A driver of another namespace, such as Ray Serve's, would not see ours.
    actors: list[dict[str, str]] = ray.util.list_named_actors(all_namespaces=True)
    ours = (each["name"] for each in actors if each["namespace"] == NAMESPACE)
    return [name for name in ours if name.startswith(f"{deployment}/")]


def _find_group(deployment: str, service: str) -> PlacementGroup | None:
    try:
        return ray.util.get_placement_group(f"{deployment}/{service}")
    except ValueError:  # what Ray raises where there is none
        return None


def _make_group(deployment: str, service: str, needs: ServiceNeeds) -> PlacementGroup:
    bundles = [needs.bundle] * needs.ranks
    strategy = strategy_for(needs, node_resources())
    return placement_group(bundles, strategy=strategy, name=f"{deployment}/{service}", lifetime="detached")


def _options(needs: ServiceNeeds, group: PlacementGroup | None, rank: int) -> dict[str, Any]:
    options: dict[str, Any] = {
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "max_concurrency": THREADS,
        "num_cpus": needs.cpus,
        "num_gpus": needs.gpus,
        "resources": needs.resources,
        "scheduling_strategy": "SPREAD",
    }
    if group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
    return options
