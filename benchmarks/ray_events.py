"""Kills and scaling on Ray under load: `python -m benchmarks.ray_events --out docs/reports`.

A target, two draft services and two coordinators on simulated models, as actors of a Ray cluster: a new local one,
or that of `--address`. Requests run all the time on both coordinators, and each text is compared with the same
target-only and undisturbed. Every actor in turn is killed by Ray without warning; draft services and a coordinator
are added and removed. The run fails if a request is lost or its text changed.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import grpc
import ray

from benchmarks import REPORTS
from benchmarks.reporting.presentation import markdown_table
from benchmarks.reporting.reports import write_rows
from benchmarks.steady_load import BETWEEN_REQUESTS, DRAFT, TARGET, TOKENS, USERS, Load, SeenByUsers, undisturbed
from paceline.local.service_process import ServiceName
from paceline.ray_cluster.deployments import RunningDeployment, connected
from paceline.ray_cluster.placement import NAMESPACE
from paceline.ray_cluster.records import ActorState, ActorStatus
from paceline.ray_cluster.settings import ConfigFiles, RaySettings, plan_deployment
from paceline.rpc.service_status import service_status

KILLED = ("target-0", "draft-0", "draft-1", "coordinator-0", "coordinator-1")
SCALED: tuple[tuple[ServiceName, int], ...] = (("draft", 3), ("draft", 2), ("coordinator", 3), ("coordinator", 2))
START_SECONDS = 120.0
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class RayEvent(SeenByUsers):
    """What was done, and what the users saw of it.

    Attributes:
        serving_s: until every actor serves, and those that leave are gone.
        sessions_s: until a draft service that was added has sessions, from when it serves; None: none was added.
    """

    what: str
    serving_s: float
    sessions_s: float | None


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, for at most `START_SECONDS`."""
    async with asyncio.timeout(START_SECONDS):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 - other processes have no event for it
            await asyncio.sleep(POLL_SECONDS)


def is_back(running: RunningDeployment, before: ActorStatus) -> bool:
    """Whether an actor serves in another process than before."""
    (now,) = (line for line in running.status() if line.name == before.name)
    return now.state == ActorState.SERVING and now.pid != before.pid


async def kill(running: RunningDeployment, service: str) -> None:
    """Kill the actor of a service, and wait until it serves again."""
    (before,) = (line for line in running.status() if line.name.endswith(f"/{service}/rank-0"))
    ray.kill(ray.get_actor(before.name, namespace=NAMESPACE), no_restart=False)
    await until(partial(is_back, running, before))


async def scale(running: RunningDeployment, role: ServiceName, count: int) -> float | None:
    """Have `count` services; returns how long a draft service that was added served before it had sessions."""
    known = {line.name for line in running.status()}
    await asyncio.to_thread(running.scale, role, count)
    lines = await asyncio.to_thread(running.await_serving, START_SECONDS, lambda line: None)
    serving = time.perf_counter()
    added = [line.address for line in lines if line.name not in known and role == "draft"]
    for address in added:
        await until(partial(has_sessions, address))
    return time.perf_counter() - serving if added else None


def has_sessions(address: str) -> bool:
    """Whether a draft service has any."""
    try:
        return service_status("draft", address).sessions > 0
    except grpc.RpcError:
        return False


async def observe(running: RunningDeployment, load: Load, what: str) -> RayEvent:
    """Do one thing, then wait until more requests have ended."""
    before = load.mark()
    began = time.perf_counter()
    verb, name, *count = what.split()
    sessions_s = None
    if verb == "kill":
        await kill(running, name)
    else:
        sessions_s = await scale(running, "draft" if name == "drafts" else "coordinator", int(count[0]))
    serving = time.perf_counter()
    await until(lambda: load.since(before).requests >= BETWEEN_REQUESTS)
    return RayEvent(
        what=what,
        serving_s=serving - began,
        sessions_s=sessions_s,
        **asdict(load.since(before)),
    )


async def run(running: RunningDeployment, rounds: int) -> tuple[Load, list[RayEvent]]:
    """Everything so many times."""
    addresses = [line.address for line in running.status() if line.role == "coordinator"]
    load = Load(await undisturbed(addresses[0]))
    users = load.start(addresses)
    whats = [*(f"kill {name}" for name in KILLED), *(f"scale {role}s {count}" for role, count in SCALED)]
    events = [await observe(running, load, what) for _ in range(rounds) for what in whats]
    await load.end(users)
    return load, events


def report(load: Load, events: Sequence[RayEvent]) -> str:
    """A table of all together and one of each event."""
    kinds = {
        "kills": sum(each.what.startswith("kill") for each in events),
        "changes of scale": sum(each.what.startswith("scale") for each in events),
    }
    rows = [
        {
            "event": each.what,
            "all serve after s": each.serving_s,
            "new draft has sessions after s": "" if each.sessions_s is None else each.sessions_s,
            **each.columns(),
        }
        for each in events
    ]
    return f"{load.table(kinds)}\n{markdown_table(rows)}"


def main() -> None:
    """Run, write the report, and fail if anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="Of a Ray cluster; a new local one if left out.")
    parser.add_argument("--rounds", type=int, default=2, help="Times that everything is done.")
    parser.add_argument("--out", type=Path, default=REPORTS)
    given = parser.parse_args()
    fields = {"name": "events", "drafts": 2, "coordinators": 2, "port": 0}
    cpus = {"target_cpus": 0.25, "draft_cpus": 0.25, "coordinator_cpus": 0.25}
    settings = RaySettings(model=TARGET, drafter=f"model:{DRAFT}", **fields, **cpus)
    with connected(given.address):
        running = RunningDeployment.start(plan_deployment(settings, ConfigFiles(), cluster_has_gpus=False))
        try:
            running.await_serving(START_SECONDS, lambda line: None)
            load, events = asyncio.run(run(running, given.rounds))
        finally:
            running.down()
    described = {"target": TARGET, "draft": DRAFT, "users": str(USERS * 2), "tokens": str(TOKENS)}
    print(write_rows(given.out, "ray-events", described, events, report(load, events)))
    if load.failures:
        raise SystemExit("\n".join(load.failures))


if __name__ == "__main__":
    main()
