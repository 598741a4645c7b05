"""Starting the services as processes with settings that can't be served."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import gguf_files


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["target_service", "-tp", "0"], 2, "tensor_parallel_size = 0"),
        (["target_service", "-tp", "2", "--engine", "llama"], 2, "llama.cpp has one rank"),
        (
            ["draft_service", "--drafter", "model:/", "--engine", "llama"],
            2,
            "engine = 'llama': must be auto or torch",
        ),
        (["target_service", "--max-num-seqs", "0"], 2, "engine.max_num_seqs = 0"),
        (["draft_service", "--drafter", "oracle"], 2, "drafters = 'oracle': must be model:NAME"),
        (
            ["draft_service", "--drafter", "model:table", "--drafter", f"model:{'x' * 507}"],
            2,
            "drafters bytes = 513: must be at most 512",
        ),
        (
            ["draft_service", "--drafter", "model:mtp", "--target-model", "table:vocab=32", "--port", "0"],
            1,
            "target table:vocab=32",
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


@pytest.mark.parametrize("arguments", [["target_service", "--model"], ["coordinator", "--target", "h:1", "--model"]])
def test_a_damaged_model_ends_the_process_as_a_bad_setting_does(tmp_path: Path, arguments: list[str]) -> None:
    file = tmp_path / "tiny.gguf"
    gguf_files.write(file)
    file.write_bytes(file.read_bytes()[:2000])
    test_a_bad_setting_ends_the_process_with_one_line(
        [*arguments, str(file), "--port", "0"], 2, f"file '{file}': damaged or truncated"
    )
