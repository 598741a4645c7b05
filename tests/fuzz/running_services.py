"""Services in processes of their own that are fuzzed: whether they live, what they log, hold and weigh."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil

from tests.e2e.cluster import Cluster, eventually
from tests.fuzz.cases import Untyped

GREW_BYTES = 192 << 20
"""What a service may weigh more than when it was first asked. gRPC and allocators keep what large messages took."""
STACKS = ("Traceback (most recent call last)", "Fatal Python error")


class WatchedServices:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._pids = {label: process.pid for label, process in cluster.processes.items()}
        self._read: dict[Path, int] = {}
        self._weighed: dict[str, int] = {}

    def check(self) -> None:
        """Raise if one has ended, or has logged a stack since it was checked last."""
        for label, process in self.cluster.processes.items():
            if process.pid != self._pids[label] or process.exit_code is not None:
                raise Untyped(f"{label} has ended: exit code {process.exit_code}")
            self._check_log(process.log_file)

    async def check_held(self) -> None:
        """Raise if sessions or rows are held, or one has grown out of its bounds."""
        await asyncio.to_thread(self.cluster.wait_idle)
        for label, process in self.cluster.processes.items():
            weighs = psutil.Process(process.pid).memory_info().rss
            grown = weighs - self._weighed.setdefault(label, weighs)
            if grown > GREW_BYTES:
                raise Untyped(f"{label} has grown by {grown >> 20} MiB")

    def facts(self) -> dict[str, str]:
        grown = {
            label: (psutil.Process(process.pid).memory_info().rss - self._weighed.get(label, 0)) >> 20
            for label, process in self.cluster.processes.items()
        }
        return {"grown by MiB": ", ".join(f"{label} {size}" for label, size in grown.items())}

    def _check_log(self, file: Path) -> None:
        with file.open("rb") as log:
            log.seek(self._read.get(file, 0))
            said = log.read()
        self._read[file] = self._read.get(file, 0) + len(said)
        lines = said.decode(errors="replace").splitlines()
        for number, line in enumerate(lines):
            if any(stack in line for stack in STACKS):
                last = next((each for each in lines[number + 1 :] if each and not each.startswith(" ")), "")
                raise Untyped(f"{file.name}: {lines[max(0, number - 1)][:160]} … {last[:160]}")


async def until_linked(cluster: Cluster, *, to_draft: bool) -> None:
    """Wait until the coordinator has a target to ask, or a draft."""

    def ready() -> bool:
        with cluster.client() as client:
            model = client.describe_models()[0]
            return model.draft_ready if to_draft else model.target_ready

    await asyncio.to_thread(eventually, ready, "the coordinator has its link")
