"""The packages that the laboratory's commands need beside a client's."""

from __future__ import annotations

from importlib import util

from paceline.cli.support import has_engine
from paceline.protocol.errors import PacelineError


def need_benchmarks(command: str) -> None:
    """Refuse a command that draws plots or measures, where this installation can't.

    Raises:
        PacelineError: it names the package to install.
    """
    if not has_engine() or util.find_spec("matplotlib") is None:
        raise PacelineError(f"`paceline {command}` needs the benchmarks: pip install 'paceline[bench]'")
