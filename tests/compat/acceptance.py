"""aiperf: its figures of acceptance, of each reply's `metrics`, are those that the coordinator counts."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paceline.local.supervisor import SupervisedServices
from paceline.models.resolve import pulled_path
from tests.compat.harness import HarnessReport, http_url, python_environment, python_versions, run, served
from tests.e2e.cluster import free_port

MODEL = "smollm2-135m"
REQUESTS, USERS, TOKENS = 24, 4, 48
RUN_S = 200.0


def aiperf() -> list[HarnessReport]:
    """Run, and hold its histogram against the counters."""
    programs = python_environment("aiperf", "aiperf==0.13.0")
    with served_counting() as (services, port), TemporaryDirectory() as out:
        command: list[Any] = [
            *("profile", "--model", MODEL, "--url", http_url(services), "--endpoint-type", "chat", "--streaming"),
            *("--tokenizer", pulled_path(MODEL), "--concurrency", USERS, "--request-count", REQUESTS),
            *("--isl", 64, "--osl", TOKENS, "--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0"),
            *("--random-seed", 1, "--ui", "none", "--use-server-token-count", "--artifact-dir", out),
        ]
        before = counters(port)
        run([programs / "aiperf", *command], RUN_S)
        counted = {name: value - before[name] for name, value in counters(port).items()}
        exported = json.loads(next(Path(out).rglob("profile_export_aiperf.json")).read_text())
    lines = compare(exported, counted)
    shown = " ".join(["aiperf", *map(str, command[:-1]), "…"]).replace(str(Path.home()), "~")
    return [HarnessReport("aiperf", "passed", python_versions(programs), [shown], lines)]


@contextmanager
def served_counting() -> Iterator[tuple[SupervisedServices, int]]:
    """The real model with n-grams as drafts, and the port of its coordinator's metrics under vLLM's names."""
    port = free_port()
    settings = {"drafter": "ngram", "num_draft_tokens": 4, "metrics_port": port, "vllm_metrics": True}
    with served(MODEL, **settings) as services:
        yield services, port


def counters(port: int) -> dict[str, float]:
    """vLLM's speculation counters, of the coordinator."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as reply:
        text = reply.read().decode()
    names = ("drafts", "draft_tokens", "accepted_tokens")
    patterns = {name: rf"^vllm:spec_decode_num_{name}_total(?:\{{.*?\}})? (\S+)$" for name in names}
    return {name: sum(map(float, re.findall(pattern, text, re.MULTILINE))) for name, pattern in patterns.items()}


def compare(exported: Mapping[str, Any], counted: Mapping[str, float]) -> list[str]:
    """aiperf's export beside the counters of the same requests."""
    histogram = {int(j): int(count) for j, count in exported["pooled_spec_decode_acceptance_histogram"].items()}
    theirs = {"drafts": sum(histogram.values()), "accepted_tokens": sum(j * n for j, n in histogram.items())}
    if text := exported.get("total_draft_tokens"):
        theirs["draft_tokens"] = int(text["avg"])
    assert theirs["drafts"] >= REQUESTS, f"hardly anything was proposed: {histogram}"
    for name, value in theirs.items():
        assert value == counted[name], f"{name}: {value} at aiperf, {counted[name]:g} at the coordinator"
    length = 1 + theirs["accepted_tokens"] / theirs["drafts"]
    equal = ", ".join(f"{name} {value:g}" for name, value in theirs.items())
    return [f"{equal}: equal to the coordinator's counters", f"mean acceptance length {length:.4f}"]
