"""How soon a client that leaves frees its sessions: `python -m benchmarks.disconnects --out docs/reports`.

Waits for the target and the draft service to hold no session after each disconnect. They are asked every 10 ms, and
each question takes a millisecond or two: a time is too long by so much. The bar is the running step and 100 ms.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import REPORTS
from benchmarks.reporting.presentation import markdown_table, verdict
from benchmarks.reporting.reports import load_average, write_rows
from tests.e2e.cluster import eventually
from tests.gateway.gateways import LONG, MODEL, GatewayCluster

BEYOND_STEP_MS = 100.0
STEPS_MS = (0.0, 50.0)
"""What a step of the target waits beside its own time: nothing, and what a large model computes."""
DRAFT = "table:vocab=300,seed=1,noise=0.3,max_length=30000,max_kv_rows=200000"
BODY: dict[str, Any] = {"prompt": "a", "max_tokens": LONG, "ignore_eos": True}


@dataclass(frozen=True)
class Leaving:
    """A way to leave: what was asked for, and how many sessions run when the client goes."""

    name: str
    fields: dict[str, Any]
    sessions: int


LEAVINGS = (
    Leaving("stream", {"stream": True}, 1),
    Leaving("whole", {}, 1),
    Leaving("stream, n = 4", {"stream": True, "n": 4}, 4),
    Leaving("prefill of 9000 tokens", {"prompt": [1] * 9000}, 1),
)


@dataclass(frozen=True)
class LeavingTimes:
    """How long one way took, sorted, in milliseconds."""

    step_ms: float
    way: str
    took_ms: tuple[float, ...]

    def columns(self) -> dict[str, object]:
        """The report's row."""
        p99 = statistics.quantiles(self.took_ms, n=100, method="inclusive")[98]
        bar = self.step_ms + BEYOND_STEP_MS
        return {
            "step ms": f"{self.step_ms:g}",
            "client leaves": self.way,
            "disconnects": len(self.took_ms),
            "p50 ms": f"{statistics.median(self.took_ms):.0f}",
            "p99 ms": f"{p99:.0f}",
            "longest ms": f"{self.took_ms[-1]:.0f}",
            "within step + 100 ms (p99)": verdict(-p99, -bar),
        }


def freed_after_s(cluster: GatewayCluster, way: Leaving) -> float:
    """Seconds from one disconnect until the target and the draft service hold no session."""
    content = json.dumps(BODY | way.fields).encode()
    address = cluster.address_of("gateway")
    host, port = address.rsplit(":", 1)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port))) as client:
        client.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        eventually(lambda: cluster.status("target").sessions == way.sessions, "its sessions run")
    left = time.perf_counter()
    cluster.wait_idle()
    return time.perf_counter() - left


def measured(step_ms: float, disconnects: int) -> Iterator[LeavingTimes]:
    """Every way, of a target whose steps wait so long."""
    target = {"model": f"{MODEL},step_ms={step_ms:g}"}
    with (
        tempfile.TemporaryDirectory() as folder,
        GatewayCluster(Path(folder), drafters=(f"model:{DRAFT}",), target_flags=target) as cluster,
    ):
        for way in LEAVINGS:
            took = sorted(freed_after_s(cluster, way) * 1e3 for _ in range(disconnects))
            yield LeavingTimes(step_ms, way.name, tuple(took))


def main() -> None:
    """Run, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--disconnects", type=int, default=100, help="Of each way and step.")
    parser.add_argument("--out", type=Path, default=REPORTS)
    given = parser.parse_args()
    before = load_average()
    rows = [row for step_ms in STEPS_MS for row in measured(step_ms, given.disconnects)]
    settings = {"target": MODEL, "draft": DRAFT, "load average": f"{before} before, {load_average()} after"}
    print(write_rows(given.out, "disconnects", settings, rows, markdown_table([row.columns() for row in rows])))


if __name__ == "__main__":
    main()
