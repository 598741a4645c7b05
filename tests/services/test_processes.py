"""Starting the services as processes with settings that can't be served."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["target_service", "-tp", "0"], 2, "tensor_parallel_size = 0"),
        (["target_service", "--max-num-seqs", "0"], 2, "engine.max_num_seqs = 0"),
        (["draft_service", "--drafter", "oracle"], 2, "drafters = 'oracle': must be model:NAME"),
        (
            ["draft_service", "--drafter", "model:table", "--drafter", f"model:{'x' * 507}"],
            2,
            "drafters bytes = 513: must be at most 512",
        ),
        (
            ["draft_service", "--drafter", "model:table:vocab=64", "--target-model", "table:vocab=32", "--port", "0"],
            1,
            "its tokenizer",
        ),
    ],
)
def test_a_bad_setting_ends_the_process_with_one_line(arguments: list[str], code: int, text: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == code
    (line,) = [line for line in ended.stderr.splitlines() if " ERROR " in line]
    assert text in line
    assert "Traceback" not in ended.stderr
