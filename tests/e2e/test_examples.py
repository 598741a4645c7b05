"""Every example runs as its first lines say, and prints what it promises."""

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
from tests.e2e.cluster import Cluster, cluster_fixture

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = ("sync_client", "async_client", "resume", "json_schema")
TARGET = "table:vocab=260,seed=3"
"""257 ids and more read and write text as bytes, and end it."""


text_cluster = cluster_fixture(TARGET, f"{TARGET},noise=0.3")


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command; returns what it printed, line ends as they are."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
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


def test_the_list_names_every_example() -> None:
    assert {file.stem for file in EXAMPLES.glob("*.py")} == set(SCRIPTS)
    listed = (EXAMPLES / "README.md").read_text()
    assert all(f"({name}.py)" in listed for name in SCRIPTS)


def test_the_readmes_python_runs_as_it_stands(text_cluster: Cluster) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (block,) = (each for each in blocks if DEFAULT_ADDRESS in each)
    printed = run(sys.executable, "-c", block.replace(DEFAULT_ADDRESS, text_cluster.address))
    assert re.search(r" \d+\.\d+\n$", printed), "the text and its mean acceptance length"


def test_sync_client_streams_the_text(text_cluster: Cluster) -> None:
    assert example("sync_client", text_cluster) == expected_text(text_cluster) + "\n"


def test_async_client_runs_requests_and_samples(text_cluster: Cluster) -> None:
    lines = example("async_client", text_cluster).splitlines()
    assert len(lines) == 6
    assert all(line.startswith("'The ") for line in lines[:3])
    samples = [line.partition(": ")[2] for line in lines[3:]]
    assert samples[0] == lines[0].partition(": ")[2], "sample 0 is the request's own text"
    assert len(set(samples)) == 3


def test_a_resumed_text_is_the_undisturbed_one(text_cluster: Cluster) -> None:
    assert example("resume", text_cluster).endswith("\nthe same as undisturbed\n")


def test_the_document_fits_the_schema(text_cluster: Cluster) -> None:
    document = json.loads(example("json_schema", text_cluster))
    assert set(document) == {"name", "price", "colour"}
    assert document["colour"] in ("red", "green", "blue")
    assert 0 <= document["price"] <= 999


def test_a_client_in_javascript_from_the_protos_alone(text_cluster: Cluster, tmp_path: Path) -> None:
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("node and npm are not installed")
    for file in ("package.json", "client.mjs"):
        shutil.copy(EXAMPLES / "node" / file, tmp_path)
    run(npm, "install", "--silent", "--no-audit", "--no-fund", "--no-package-lock", cwd=tmp_path)
    written = run(
        node, "client.mjs", "--coordinator", text_cluster.address, "--protos", ROOT / "protos", cwd=tmp_path
    )
    assert written == expected_text(text_cluster) + "\n"
