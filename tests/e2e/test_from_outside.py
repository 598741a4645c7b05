"""What other programs see of services that run: grpcurl through reflection, and `paceline trace` of a request."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.timeline.saved import read_rounds
from tests.e2e.cluster import Cluster, cluster_fixture
from tests.timeline.trace_rules import broken_rules

ROOT = Path(__file__).parents[2]
TARGET = "table:vocab=260,seed=3"
"""Reads and writes text as bytes."""
REQUEST = ("--prompt", "Once upon a time", "--max-new-tokens", "24", "--temperature", "0")


running = cluster_fixture(TARGET, f"{TARGET},noise=0.3")


def run(*command: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return done.stdout.decode()


def paceline(*arguments: str) -> str:
    return run(sys.executable, "-c", "from paceline.cli.main import main; main()", *arguments)


def grpcurl(*arguments: str) -> str:
    program = shutil.which("grpcurl", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip("grpcurl is not installed")
    return run(program, "-plaintext", *arguments)


def test_grpcurl_finds_the_services_without_protos(running: Cluster) -> None:
    listed = grpcurl(running.address, "list").split()
    assert {"paceline.v1.GenerationService", "grpc.health.v1.Health"} <= set(listed)
    described = grpcurl(running.address, "describe", "paceline.v1.GenerationService")
    assert (
        "rpc Generate ( .paceline.v1.GenerateRequest ) returns ( stream .paceline.v1.GenerateResponse );" in described
    )


def test_grpcurl_generates_what_the_client_does(running: Cluster) -> None:
    asked = {"prompt": "Once upon a time", "seed": "7", "maxNewTokens": 24}
    answer = grpcurl("-d", json.dumps(asked), running.address, "paceline.v1.GenerationService/Generate")
    events = _documents(answer)
    text = "".join(event.get("tokens", event.get("finished", {})).get("text", "") for event in events)
    with running.client() as client:
        assert text == client.generate(prompt="Once upon a time", seed=7, max_new_tokens=24).text
    assert events[0]["started"]["seed"] == "7"
    assert events[-1]["finished"]["stats"]["committed"] == 24


def _documents(text: str) -> list[dict[str, Any]]:
    """JSON documents that follow each other."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while text[at:].strip():
        at += len(text[at:]) - len(text[at:].lstrip())
        document, at = decoder.raw_decode(text, at)
        found.append(document)
    return found


def test_a_request_is_run_and_written_for_perfetto(running: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    shown = paceline("trace", *REQUEST, "--url", running.address, "--out", str(file), "--gantt")
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


def test_a_saved_response_is_traced_again(running: Cluster, tmp_path: Path) -> None:
    saved, own, again = (tmp_path / name for name in ("saved.json", "own.json", "again.json"))
    written = paceline(
        "generate", *REQUEST, "--coordinator", running.address, "--json", "--rounds", "--trace-file", str(own)
    )
    saved.write_text(written)
    paceline("trace", "--request", str(saved), "--out", str(again))
    assert json.loads(own.read_text()) == json.loads(again.read_text())
    assert len(read_rounds(saved)) == json.loads(written)["stats"]["rounds"]
