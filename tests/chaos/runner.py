"""One fault after the other under load: inject, repair, judge, measure."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial

import psutil

from tests.chaos.blows import Aim, Blow
from tests.chaos.cluster import ChaosCluster
from tests.chaos.doomed import GRPC, DoomedClient
from tests.chaos.faults import BLOWS, CLIENT_KINDS, Fault, Kind
from tests.chaos.lies import COST_LIES, DRAFT_LIES, without_verdicts
from tests.chaos.oracle import Holdings, Judged, judge
from tests.chaos.requests import (
    HTTP,
    VARIANTS,
    WAIT_S,
    Asked,
    Ended,
    Manner,
    all_requests,
    ask,
    ask_http,
    recovered_s,
)
from tests.chaos.shapes import BEHIND_GATEWAY
from tests.chaos.states import State
from tests.chaos.trigger import Armed
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


AT_ONCE = 4
"""Requests under way when a fault falls."""
RESUME_WAIT_S = 20.0
SUPERVISION_S = 0.05
FITTING = {
    State.RUN: ("off",),
    State.PREFETCH: ("model", "tree"),
    State.DRAFTING: ("model", "tree"),
    State.PROPOSAL: ("model", "logprobs"),
    State.COMMIT: ("model", "greedy"),
    State.FEATURES: ("features",),
    State.STOP: ("stopping", "model"),
}
"""Forms whose rounds have such a state for certain."""


@dataclass(frozen=True)
class Outcome:
    """What came of a fault, `struck` or not: one that fell on nothing counts for nothing. Seconds are from its fall:
    until a surviving process said so in its log, and until the last request had a token again; None: none had to."""

    fault: Fault
    struck: bool
    victim: str
    requests: int
    judged: Judged
    notice_s: float | None
    recover_s: float | None
    seconds: float


class Runner:
    def __init__(self, cluster: ChaosCluster) -> None:
        self._cluster = cluster
        self._holdings = Holdings()
        self._expected: dict[Asked, Ended] = {}
        self._victim = ""
        self._doomed: DoomedClient | None = None
        """The client that is to be killed."""

    async def prepare(self, asked: Sequence[Asked]) -> None:
        """Run requests undisturbed, those that were not yet; then what the processes hold is taken down."""
        new = [each for each in asked if each not in self._expected]
        if not new:
            return
        found = await self._load(new)
        bad = {each: ended.error for each, ended in found.items() if ended.error}
        assert not bad, f"undisturbed requests failed: {bad}"
        self._expected |= found
        await asyncio.to_thread(self._cluster.settle)
        await asyncio.to_thread(self._holdings.check, self._cluster)

    async def run(self, fault: Fault) -> Outcome:
        """Inject one fault while requests run; returns when all is as it was, or is not in time."""
        asked = chosen(fault)
        await self.prepare(asked)
        if fault.kind is not Kind.KILL_CLIENT:
            return await self._run(fault, asked)
        way = HTTP if fault.link == "gateway" else GRPC
        with DoomedClient(way, self._cluster.proxies[fault.link].address) as self._doomed:
            await asyncio.to_thread(self._doomed.begin)
            return await self._run(fault, asked)

    async def _run(self, fault: Fault, asked: Sequence[Asked]) -> Outcome:
        begun, places = time.monotonic(), LogPlaces(self._cluster)
        armed = self._arm(fault)
        load = asyncio.ensure_future(self._load(asked, fault))
        supervised = asyncio.ensure_future(self._supervised(load))
        if fault.state is State.DRAIN:
            await self._drain(fault, armed, load)
        load.add_done_callback(lambda _: armed.struck.set())
        await asyncio.to_thread(armed.struck.wait)
        self._cluster.trigger.disarm()
        wall_at = time.time() - (time.monotonic() - armed.at)
        if armed.has_fallen:
            await asyncio.to_thread(armed.over.wait)
            assert armed.failure is None, f"the fault itself failed: {armed.failure!r}"
        got = await supervised
        judged = await self._settled(judge(fault, self._expected, got))
        return Outcome(
            fault,
            armed.has_fallen,
            self._victim or armed.label,
            len(got),
            judged,
            places.noticed(wall_at, self._victim) if armed.has_fallen else None,
            recovered_s(armed.at, list(got.values())) if armed.has_fallen else None,
            time.monotonic() - begun,
        )

    async def _supervised(self, load: asyncio.Future[dict[Asked, Ended]]) -> dict[Asked, Ended]:
        """Start again what ends, as a supervisor does, until all requests have ended."""
        while True:
            await asyncio.to_thread(self._cluster.revive)
            done, _ = await asyncio.wait([load], timeout=SUPERVISION_S)
            if done:
                return load.result()

    async def _settled(self, judged: Judged) -> Judged:
        try:
            await asyncio.to_thread(self._cluster.settle)
            leaked = await asyncio.to_thread(self._holdings.check, self._cluster)
        except AssertionError as error:
            leaked = (str(error),)
        return replace(judged, leaked=leaked)

    def _arm(self, fault: Fault) -> Armed:
        labels = frozenset(label for label, role in self._cluster.shape.role_of_proxy.items() if role == fault.link)
        self._victim = ""
        armed = Armed(labels, fault.state, fault.skip, lambda label: self._aim(fault, label))
        if fault.state is not State.DRAIN:
            self._cluster.trigger.arm(armed)
        return armed

    async def _drain(self, fault: Fault, armed: Armed, load: asyncio.Future[dict[Asked, Ended]]) -> None:
        """Tell the peer to stop once the load is at it; the blow falls on what it still sends or gets."""
        await asyncio.wait([load], timeout=0.05)
        label = await asyncio.to_thread(self._cluster.busy_label, fault.peer)
        armed.state = State.ANY
        armed.labels = frozenset(each for each in armed.labels if each in (label, BEHIND_GATEWAY))
        self._victim = label
        self._cluster.terminate(label)
        self._cluster.trigger.arm(armed)

    def _aim(self, fault: Fault, label: str) -> Aim:
        if fault.kind in BLOWS:
            return Aim(BLOWS[fault.kind], fault.moment, fault.seconds, fault.byte, lie=_lie(fault))
        return Aim(Blow.CALL, fault.moment, call=lambda: self._hurt(fault, label))

    def _hurt(self, fault: Fault, label: str) -> None:
        if fault.kind is Kind.KILL_CLIENT and self._doomed is not None:
            self._doomed.kill()
        self._victim = self._victim or victim_of(self._cluster, fault, label)
        hurt(self._cluster, fault, self._victim)

    async def _load(self, asked: Sequence[Asked], fault: Fault | None = None) -> dict[Asked, Ended]:
        pause_s = fault.seconds if fault is not None and fault.kind is Kind.SLOW_READER else 0.0
        leaves = fault is not None and fault.kind is Kind.LEAVE
        stays = Manner(pause_s, patience_s=WAIT_S)
        first = replace(stays, leave_after=fault.skip) if fault is not None and leaves else stays
        gateway = self._cluster.proxies["gateway"].address if "gateway" in self._cluster.proxies else ""
        async with self._cluster.through(resume_wait_s=RESUME_WAIT_S) as client:
            ends = await asyncio.gather(
                *(
                    asyncio.to_thread(ask_http, gateway, each, pause_s)
                    if each.form == HTTP
                    else ask(client, each.request, stays if place else first)
                    for place, each in enumerate(asked)
                )
            )
        return dict(zip(asked, ends, strict=True))


def chosen(fault: Fault) -> list[Asked]:
    """Requests, all different: half of them of forms that have the fault's state."""
    source = random.Random(fault.seed)
    over_grpc = sorted({each.form for each in all_requests(fault.shape)} - {HTTP})
    fitting = (HTTP,) if fault.link == "gateway" else FITTING.get(fault.state, over_grpc)
    if fault.kind in CLIENT_KINDS:
        fitting = over_grpc
    first = source.sample([Asked(form, variant) for form in fitting for variant in range(VARIANTS)], k=AT_ONCE // 2)
    others = [each for each in all_requests(fault.shape) if each not in first]
    return [*first, *source.sample(others, k=AT_ONCE - len(first))]


def _lie(fault: Fault) -> Callable[[bytes], bytes]:
    source = random.Random(fault.seed)
    if fault.kind is Kind.WITHHELD:
        return without_verdicts
    if fault.kind is Kind.LYING_COSTS:
        return lambda message: COST_LIES[fault.peer](message, source)
    lie = DRAFT_LIES[sorted(DRAFT_LIES)[fault.byte % len(DRAFT_LIES)]]
    return lambda message: lie(message, source)


SAYING = ("link broken", "link closed", "draft is late", "request failed", "connection dropped", "cut off")
"""Lines below WARNING by which a service says that a peer or a client is not as it should be."""


class LogPlaces:
    def __init__(self, cluster: ChaosCluster) -> None:
        self._files = {label: process.log_file for label, process in cluster.processes.items()}
        self._sizes = {label: file.stat().st_size for label, file in self._files.items()}

    def noticed(self, at: float, victim: str) -> float | None:
        """Seconds from `at` (of `time.time`) to the first line about it of any process but the victim; None: none."""
        times = [time for label in self._files if label != victim for time in self._lines(label) if time >= at - 1e-3]
        return max(0.0, min(times) - at) if times else None

    def _lines(self, label: str) -> Iterator[float]:
        with self._files[label].open("rb") as log:
            log.seek(self._sizes[label])
            for line in log:
                try:
                    said = json.loads(line)
                except ValueError:
                    continue
                if said["level"] in ("WARNING", "ERROR") or said["message"].startswith(SAYING):
                    yield datetime.fromisoformat(said["time"]).timestamp()
