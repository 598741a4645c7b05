"""`deploy/ray/vllm.py`: the programs take what it says to them. `test_deployment` has Ray place both."""

from __future__ import annotations

import json
import runpy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from paceline.drafting.client import DraftClientSettings
from paceline_vllm import DraftProposer
from tests.docs.test_commands import check_paceline

FILE = Path(__file__).parents[2] / "deploy" / "ray" / "vllm.py"


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
