"""What other programs get of services that run: examples, grpcurl through reflection, `paceline trace`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.client import DEFAULT_ADDRESS
from paceline.protocol.sampling import SamplingParams
from paceline.timeline.layout import chrome_trace
from paceline.timeline.saved import read_rounds
from tests.e2e.cluster import Cluster, cluster_fixture
from tests.timeline.trace_rules import broken_rules
from tests.warm import PACELINE

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TARGET = "table:vocab=260,seed=3"
"""257 ids and more read and write text as bytes, and end it."""
REQUEST = ("--prompt", "Once upon a time", "--max-new-tokens", "24", "--temperature", "0")

services = cluster_fixture(TARGET, f"{TARGET},noise=0.3")


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command; returns what it printed, line ends as they are."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", "COLUMNS": "120"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, check=False, timeout=150)
    assert done.returncode == 0, (done.stdout + done.stderr).decode(errors="replace")
    return done.stdout.decode()


def example(name: str, cluster: Cluster) -> str:
    return run(sys.executable, EXAMPLES / f"{name}.py", "--coordinator", cluster.address)


def expected_text(cluster: Cluster) -> str:
    """What the request of `sync_client.py` and `client.mjs` generates."""
    with cluster.client() as client:
        return client.generate(
            prompt="Once upon a time",
            sampling=SamplingParams(temperature=0.8, top_p=0.95),
            max_new_tokens=48,
            seed=7,
        ).text


def test_the_readmes_python_runs_as_it_stands(services: Cluster) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (block,) = (each for each in blocks if DEFAULT_ADDRESS in each)
    printed = run(sys.executable, "-c", block.replace(DEFAULT_ADDRESS, services.address))
    assert re.search(r" \d+\.\d+\n$", printed), "the text and its mean acceptance length"


def test_sync_client_streams_the_text(services: Cluster) -> None:
    assert example("sync_client", services) == expected_text(services) + "\n"


def test_async_client_runs_requests_and_samples(services: Cluster) -> None:
    lines = example("async_client", services).splitlines()
    assert len(lines) == 6
    assert all(line.startswith("'The ") for line in lines[:3])
    samples = [line.partition(": ")[2] for line in lines[3:]]
    assert samples[0] == lines[0].partition(": ")[2], "sample 0 is the request's own text"
    assert len(set(samples)) == 3


def test_a_resumed_text_is_the_undisturbed_one(services: Cluster) -> None:
    assert example("resume", services).endswith("\nthe same as undisturbed\n")


def test_the_document_fits_the_schema(services: Cluster) -> None:
    document = json.loads(example("json_schema", services))
    assert set(document) == {"name", "price", "colour"}
    assert document["colour"] in ("red", "green", "blue")
    assert 0 <= document["price"] <= 999


@pytest.mark.full
def test_a_client_in_javascript_from_the_protos_alone(services: Cluster, tmp_path: Path) -> None:
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("node and npm are not installed")
    for file in ("package.json", "client.mjs"):
        shutil.copy(EXAMPLES / "node" / file, tmp_path)
    run(npm, "install", "--silent", "--no-audit", "--no-fund", "--no-package-lock", cwd=tmp_path)
    written = run(node, "client.mjs", "--coordinator", services.address, "--protos", ROOT / "protos", cwd=tmp_path)
    assert written == expected_text(services) + "\n"


def paceline(*arguments: str) -> str:
    return run(*PACELINE, *arguments)


def grpcurl(*arguments: str) -> str:
    program = shutil.which("grpcurl", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip("grpcurl is not installed")
    return run(program, "-plaintext", *arguments)


def test_grpcurl_finds_the_services_without_protos(services: Cluster) -> None:
    listed = grpcurl(services.address, "list").split()
    assert {"paceline.v1.GenerationService", "grpc.health.v1.Health"} <= set(listed)
    described = grpcurl(services.address, "describe", "paceline.v1.GenerationService")
    assert "rpc Generate ( .paceline.v1.GenerateRequest )" in described


def test_a_request_is_run_and_written_for_perfetto(services: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    shown = paceline("trace", *REQUEST, "--url", services.address, "--out", str(file), "--gantt")
    trace = json.loads(file.read_text())
    assert list(broken_rules(trace)) == []
    tracks = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert tracks == {"coordinator", "target", "draft"}
    rounds = [event for event in trace["traceEvents"] if (event["ph"], event["name"]) == ("X", "round")]
    assert 1 + sum(line.strip()[:1].isdigit() for line in shown.splitlines()) >= len(rounds) > 3
    assert sum(event["args"]["accepted"] + 1 for event in rounds) >= 24
    last = max(event["ts"] + event["dur"] for event in rounds)
    covered = sum(event["dur"] for event in rounds)
    assert 0.5 < covered / (last - rounds[0]["ts"]) <= 1, "rounds stand where they were, with little between them"


@pytest.mark.full
def test_a_saved_response_is_traced_again(services: Cluster, tmp_path: Path) -> None:
    saved, again = tmp_path / "saved.json", tmp_path / "again.json"
    written = paceline("generate", *REQUEST, "--coordinator", services.address, "--json", "--rounds")
    saved.write_text(written)
    paceline("trace", "--request", str(saved), "--out", str(again))
    records = read_rounds(saved)
    assert len(records) == json.loads(written)["stats"]["rounds"]
    assert json.loads(again.read_text()) == chrome_trace(records)
