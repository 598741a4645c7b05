"""Every command that a document shows is one that exists, with flags that it takes."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer

from paceline.cli.main import app

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "examples").glob("*.md"),
    *(ROOT / "deploy").rglob("*.md"),
)
SERVICES = {
    "target-service": "target_service",
    "draft-service": "draft_service",
    "coordinator": "coordinator",
    "gateway": "paceline_gateway",
}
FENCE = re.compile(r"^```(?:sh|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands(document: str) -> Iterator[list[str]]:
    """The words of each command in a document's shell blocks, as far as the first pipe or `&&`."""
    for block in FENCE.findall(document):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            ends = [index for index, word in enumerate(words) if word in ("|", "&&", ">")]
            if words:
                yield words[: min(ends, default=len(words))]


def documented() -> list[tuple[str, list[str]]]:
    found = [(file.name, words) for file in DOCUMENTS for words in commands(file.read_text())]
    return sorted({(name, tuple(words)): (name, words) for name, words in found}.values())


@cache
def paceline() -> Any:
    """The command with all below it."""
    return typer.main.get_command(app)


def check_paceline(arguments: list[str]) -> None:
    """Parse the arguments of `paceline` as it would, and run nothing."""
    if arguments[0] in SERVICES:
        check_module(SERVICES[arguments[0]], arguments[1:])
        return
    command, name, context = paceline(), "paceline", None
    while True:
        context = command.make_context(name, arguments, parent=context)
        if not hasattr(command, "resolve_command"):
            return
        name, command, arguments = command.resolve_command(context, [*context._protected_args, *context.args])


@cache
def help_text(module: str) -> str:
    """What `python -m MODULE --help` prints."""
    printed = StringIO()
    with (
        warnings.catch_warnings(category=RuntimeWarning, action="ignore"),  # another test may have imported it
        mock.patch.dict(os.environ, COLUMNS="300"),
        mock.patch.object(sys, "argv", [module, "--help"]),
        redirect_stdout(printed),
        pytest.raises(SystemExit, match=r"^0$"),
    ):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    return printed.getvalue()


def check_module(module: str, arguments: list[str]) -> None:
    """Look for each flag in the module's help."""
    known = help_text(module)
    for flag in (argument.partition("=")[0] for argument in arguments if argument.startswith("-")):
        assert re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", known), f"python -m {module} has no {flag}"


def check(words: list[str]) -> None:
    program, *arguments = words
    if program == "paceline":
        check_paceline(arguments)
    elif program == "make":
        targets = [word for word in arguments if "=" not in word]
        makefile = (ROOT / "Makefile").read_text()
        assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets), targets
    elif words[:2] == ["python", "-m"]:
        check_module(arguments[1], arguments[2:])
    elif program == "python":
        assert (ROOT / arguments[0]).is_file()


@pytest.mark.parametrize(("name", "words"), documented(), ids=lambda value: value if isinstance(value, str) else None)
def test_a_documented_command_exists(name: str, words: list[str]) -> None:
    check(words)


@pytest.mark.parametrize(
    "line",
    [
        "paceline serve --run-ahead 4",
        "paceline bench spede",
        "paceline generate --max-new-tokens many",
        "paceline coordinator --max-staged 4",
        "python -m paceline_lab.bench.gpu --sessoins 4",
        "python examples/gone.py",
        "make dmeo",
    ],
)
def test_a_command_that_does_not_exist_is_found(line: str) -> None:
    with pytest.raises((AssertionError, typer.TyperException)):
        check(shlex.split(line))
