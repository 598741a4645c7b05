"""What `paceline bench ab` refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app

runner = CliRunner()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["ab", "http", "--users", "0"], ("users", "0")),
        (["ab", "http", "--users", "many"], ("users", "many")),
        (["ab", "http", "--turns", "0"], ("turns", "0")),
        (["ab", "http", "--tokens", "1"], ("tokens", "1", "at least 2")),
        (["ab", "http", "--arms", "off"], ("arms", "off", "gRPC, HTTP")),
        (["ab", "http", "--against", "gone"], ("against", "gone", "folder")),
        (["ab", "loads"], ("experiment", "loads", "http, tracing, overlap")),
    ],
)
def test_what_no_grid_has_is_refused_by_name(given: list[str], named: tuple[str, str], tmp_path: Path) -> None:
    result = runner.invoke(app, ["bench", *given, "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert all(part in result.stderr for part in named), result.stderr
    assert not list(tmp_path.iterdir())
