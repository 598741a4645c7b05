"""`deploy/ray/vllm.py`: the programs take what it says to them, and Ray places both."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.drafting.client import DraftClientSettings
from paceline_vllm import DraftProposer
from tests.docs.test_commands import check_paceline
from tests.e2e.cluster import eventually
from tests.ray.driving import ENVIRONMENT

FILE = Path(__file__).parents[2] / "deploy" / "ray" / "vllm.py"
STANDS_IN = """#!/bin/sh
echo "$(basename "$0") $* pid $$" >> {notes}
test "$(basename "$0")" = vllm || exec sleep 100
"""


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(FILE))


def test_the_draft_service_takes_its_command(example: dict[str, Any]) -> None:
    command = example["draft_command"]("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B")
    assert command[0] == "paceline"
    check_paceline(command[1:])


def test_vllm_is_told_where_the_draft_is(example: dict[str, Any]) -> None:
    command = example["vllm_command"]("M", 2, "10.0.0.7")
    assert command[:3] == ["vllm", "serve", "M"]
    flags = dict(pairwise(command))
    drafts = DraftClientSettings.model_validate(json.loads(flags["--additional-config"])["paceline"])
    assert drafts.draft.address == (f"10.0.0.7:{example['PORT']}",)
    proposer = json.loads(flags["--speculative-config"])["model"]
    assert proposer == f"{DraftProposer.__module__.partition('.')[0]}.{DraftProposer.__name__}"


def test_ray_places_both_and_ends_the_draft_with_the_server(tmp_path: Path) -> None:
    """Programs that stand in note what they were told. vLLM's ends at once, the draft's would go on."""
    notes = tmp_path / "notes"
    for name in ("vllm", "paceline"):
        (tmp_path / name).write_text(STANDS_IN.format(notes=notes))
        (tmp_path / name).chmod(0o755)
    flags = ["--address", "local", "--model", "M", "--degree", "0", "--draft-gpus", "0", "--draft-resource", ""]
    environment = ENVIRONMENT | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, FILE, *flags], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    (draft, pid), (vllm, _) = (line.rsplit(" pid ", 1) for line in notes.read_text().splitlines())
    assert draft.startswith("paceline draft-service --target-model M ")
    node = done.stdout.partition("draft service at ")[2].partition(",")[0]
    assert f'"address": "{node}"' in vllm
    eventually(lambda: not psutil.pid_exists(int(pid)), "the draft has ended")
