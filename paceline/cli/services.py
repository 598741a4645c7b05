"""The services one by one: `paceline target-service`, `draft-service`, `coordinator`."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import typer

from paceline.cli.app import app
from paceline.cli.support import need_engine
from paceline.runtime.config import DRAFT_PORT, LOCALHOST, TARGET_PORT

_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _exec_service(module: str, context: typer.Context, example: str) -> NoReturn:
    """Become the service; its own `--help` names every flag."""
    need_engine(context.info_name or module)
    if {"-h", "--help"} & set(context.args):
        typer.echo(f"Example: {example}")
    sys.stdout.flush()
    arguments = ["--help" if argument == "-h" else argument for argument in context.args]
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])  # noqa: S606 - no shell is the point


@app.command("target-service", context_settings=_PASS_ON)
def target_service(context: typer.Context) -> None:
    """Run one target service; takes the arguments of `python -m target_service`."""
    _exec_service("target_service", context, f"paceline target-service --model smollm2-135m --port {TARGET_PORT}")


@app.command("draft-service", context_settings=_PASS_ON)
def draft_service(context: typer.Context) -> None:
    """Run one draft service; takes the arguments of `python -m draft_service`."""
    _exec_service(
        "draft_service",
        context,
        f"paceline draft-service --drafter model:default --target-model smollm2-135m --port {DRAFT_PORT}",
    )


@app.command(context_settings=_PASS_ON)
def coordinator(context: typer.Context) -> None:
    """Run one coordinator; takes the arguments of `python -m coordinator`."""
    addresses = f"--target {LOCALHOST}:{TARGET_PORT} --draft {LOCALHOST}:{DRAFT_PORT}"
    _exec_service("coordinator", context, f"paceline coordinator --model smollm2-135m {addresses}")
