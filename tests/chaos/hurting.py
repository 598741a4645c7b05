"""What a fault does to a process, once its frame has come."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from functools import partial

import psutil

from tests.chaos.cluster import ChaosCluster
from tests.chaos.faults import CLIENT_KINDS, Fault, Kind
from tests.e2e.cluster import ranks_of

HOUR, TEN_YEARS = 3600, 10 * 365 * 86400
JUMPS = (HOUR, -HOUR, TEN_YEARS, -TEN_YEARS)


def victim_of(cluster: ChaosCluster, fault: Fault, label: str) -> str:
    """The process that suffers, where the frame passed the proxy of this label; empty: a client does."""
    if fault.kind in CLIENT_KINDS:
        return ""
    role = "target" if fault.peer == "rank" else fault.peer
    same = cluster.shape.role_of_proxy[label] == role
    return label if same and label in cluster.shape.labels else cluster.busy_label(role)


def hurt(cluster: ChaosCluster, fault: Fault, victim: str) -> None:
    if victim:
        _WAYS[fault.kind](cluster, fault, victim)


def _kill(cluster: ChaosCluster, fault: Fault, victim: str) -> None:
    if fault.peer != "rank":
        cluster.kill(victim)
        return
    for rank in ranks_of(cluster.processes[victim].pid):
        rank.kill()


def _freeze(cluster: ChaosCluster, fault: Fault, victim: str) -> None:
    if fault.peer != "rank":
        cluster.freeze(victim, fault.seconds)
        return
    for rank in ranks_of(cluster.processes[victim].pid):
        rank.suspend()
        _later(fault.seconds, rank.resume)


def _restart(cluster: ChaosCluster, fault: Fault, victim: str) -> None:
    cluster.terminate(victim)


def _limit(cluster: ChaosCluster, fault: Fault, victim: str) -> None:
    cluster.limit(victim, fault.kind is Kind.MEMORY, fault.seconds)


def _jump(cluster: ChaosCluster, fault: Fault, victim: str) -> None:
    cluster.jump(victim, JUMPS[fault.byte % len(JUMPS)])
    _later(fault.seconds, lambda: cluster.jump(victim, 0))


def _expire(cluster: ChaosCluster, fault: Fault, victim: str) -> None:
    """To a process that lives ten years later all certificates of its peers have expired; it has to shake hands."""
    cluster.jump(victim, TEN_YEARS)
    cluster.cut(victim)
    _later(fault.seconds, lambda: cluster.jump(victim, 0))


def _unresolve(cluster: ChaosCluster, fault: Fault, victim: str) -> None:
    """No name resolves while a coordinator starts anew; or one target's address is no longer in the answer."""
    if fault.peer == "coordinator":
        cluster.resolve("target", [])
        cluster.resolve("draft", [])
        cluster.kill(victim)
    else:
        cluster.resolve("target", [label for label in cluster.labels_of("target") if label != victim])
    for role in ("target", "draft"):
        _later(fault.seconds, partial(cluster.resolve, role, cluster.labels_of(role)))


def _later(seconds: float, call: Callable[[], object]) -> None:
    def calls() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            call()

    threading.Timer(seconds, calls).start()


_WAYS: Mapping[Kind, Callable[[ChaosCluster, Fault, str], None]] = {
    Kind.KILL: _kill,
    Kind.FREEZE: _freeze,
    Kind.RESTART: _restart,
    Kind.FULL_DISK: _limit,
    Kind.MEMORY: _limit,
    Kind.CLOCK: _jump,
    Kind.EXPIRY: _expire,
    Kind.DNS: _unresolve,
}
