"""When the surviving processes noticed a fault, by their own logs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime

from tests.chaos.cluster import ChaosCluster

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
