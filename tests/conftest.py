"""What holds for every test."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.warm import compile_in_turn, warm_processes

settings.register_profile("no deadline", deadline=None)  # a busy machine takes its time
settings.load_profile("no deadline")
ON_CPU = os.environ.get("PACELINE_TEST_DEVICE", "cpu") == "cpu"
if ON_CPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which torch does where it is installed
FOLDERS_THAT_WAIT = ("chaos", "cli", "e2e", "gateway", "ray")
"""Tests of whole services, which mostly wait: beside others, which compute, they leave no core idle."""
LAST_WAIT = 0.9
"""Of a run, by its files: where the last of them begins, so that a short one ends it."""
YOUNG_OBJECTS = 20_000
"""Between looks for garbage; the interpreter's 700 take a twentieth of a run's time."""


@pytest.hookimpl(trylast=True)  # behind the one that makes the reporter
def pytest_configure(config: pytest.Config) -> None:
    """Have failures shown when they happen: a run that is cut off later has said what failed."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(terminal))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Keep what is imported from the garbage collector: nothing of it goes, and it takes a second to look through."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)  # behind those that deselect
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the files that wait evenly over a run of several workers; Ray's, the longest, come first."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    files = dict.fromkeys(item.path for item in items)
    waiting = [file for file in reversed(files) if _folder(file) in FOLDERS_THAT_WAIT]
    others = [file for file in files if _folder(file) not in FOLDERS_THAT_WAIT]
    places = {file: LAST_WAIT * place / len(waiting) for place, file in enumerate(waiting)}
    places |= {file: place / len(others) for place, file in enumerate(others)}
    items.sort(key=lambda item: places[item.path])


def _folder(file: Path) -> str:
    return file.relative_to(Path(__file__).parent).parts[0]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop() -> Iterator[Any]:
    """Whoever needs a program to load as it does for a user starts it by another command (`tests/warm.py`)."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # other tests have the other cores
    if (worker := os.environ.get("PYTEST_XDIST_WORKER")) is not None:
        compile_in_turn(int(worker.removeprefix("gw")))
    with warm_processes() if ON_CPU else nullcontext():  # CUDA works in no fork of a process that has asked for it
        gc.set_threshold(YOUNG_OBJECTS)  # in this process alone: services collect as they do for a user
        return (yield)


class FailuresAtOnce:
    """Prints each failure as it comes in; pytest's own summary comes at the end all the same."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.ensure_newline()
            self._terminal.section(f"{report.nodeid} ({report.when})", "-")
            self._terminal.write_line(report.longreprtext)
