"""Progress where no terminal shows it."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from paceline_lab.reporting.progress import LOG_LINES, progress_bar


@pytest.mark.parametrize(("total", "lines"), [(3, 3), (1000, LOG_LINES)])
def test_a_log_has_a_few_lines_however_many_steps_there_are(total: int, lines: int) -> None:
    log = StringIO()
    with progress_bar(Console(file=log, soft_wrap=True), "runs", total) as advance:
        for step in range(total):
            advance(f"step {step}")
    shown = log.getvalue().splitlines()
    assert len(shown) == lines
    assert shown[-1].startswith(f"runs: {total} of {total}, step {total - 1}, after ")
