"""How soon a client that leaves frees its sessions: `python -m benchmarks.disconnects`.

Waits for the target to hold no session after each disconnect; a question to it takes a millisecond or two.
"""

from __future__ import annotations

import json
import socket
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.cluster import eventually
from tests.gateway.gateways import LONG, GatewayCluster

PER_WAY = 12
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


def main() -> None:
    """Print p50 and p99 of each way, in milliseconds."""
    with (
        tempfile.TemporaryDirectory() as folder,
        GatewayCluster(Path(folder), drafters=(f"model:{DRAFT}",)) as cluster,
    ):
        for way in LEAVINGS:
            took = sorted(freed_after_s(cluster, way) * 1e3 for _ in range(PER_WAY))
            p99 = statistics.quantiles(took, n=100, method="inclusive")[98]
            print(f"{way.name}: {PER_WAY} disconnects, p50 {statistics.median(took):.0f} ms, p99 {p99:.0f} ms")


if __name__ == "__main__":
    main()
