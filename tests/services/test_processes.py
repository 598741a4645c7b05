"""Starting the services with settings that can't be served."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.drafters.names import check_drafters
from paceline.protocol.errors import InvalidInput
from paceline.runtime.config import TargetConfig
from paceline.runtime.options import parse
from tests.models import gguf_files

COORDINATOR = pytest.param(["coordinator", "--target", "h:1", "--model"], marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["target_service", "-tp", "0"], 2, "tensor_parallel_size = 0"),
        (["draft_service", "--drafter", "model:/", "--engine", "llama"], 2, "engine = 'llama': must be auto"),
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


def test_settings_that_cannot_be_are_named() -> None:
    with pytest.raises(InvalidInput, match=r"llama\.cpp has one rank"):
        parse(TargetConfig, "", ["-tp", "2", "--engine", "llama"], {})
    with pytest.raises(InvalidInput, match="drafters bytes = 513: must be at most 512"):
        check_drafters(["model:table", f"model:{'x' * 507}"])


@pytest.mark.parametrize("arguments", [["target_service", "--model"], COORDINATOR])
def test_a_damaged_model_ends_the_process_as_a_bad_setting_does(tmp_path: Path, arguments: list[str]) -> None:
    file = tmp_path / "tiny.gguf"
    gguf_files.write(file)
    file.write_bytes(file.read_bytes()[:2000])
    test_a_bad_setting_ends_the_process_with_one_line(
        [*arguments, str(file), "--port", "0"], 2, f"file '{file}': damaged or truncated"
    )
