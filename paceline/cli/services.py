"""The services one by one: `paceline target-service`, `draft-service`, `coordinator`, `gateway`."""

from __future__ import annotations

import os
import sys

import typer

from paceline.cli.app import app
from paceline.cli.support import need_engine
from paceline.local.settings import missing_packages
from paceline.protocol.errors import PacelineError

_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
_MODULES = {
    "target-service": "target_service",
    "draft-service": "draft_service",
    "coordinator": "coordinator",
    "gateway": "paceline_gateway",
}


def _become(context: typer.Context) -> None:
    """Run the service in place of this process; its own `--help` names every flag."""
    command = context.info_name or ""
    need_engine(command)
    if command == "gateway" and (missing := missing_packages()):
        raise PacelineError(f"`paceline gateway` needs {', '.join(missing)}: pip install 'paceline[http]'")
    sys.stdout.flush()
    arguments = ["--help" if argument == "-h" else argument for argument in context.args]
    os.execv(sys.executable, [sys.executable, "-m", _MODULES[command], *arguments])  # noqa: S606 - no shell is the point


for _command, _module in _MODULES.items():
    _help = f"Run one {_command.replace('-', ' ')}; takes the arguments of `python -m {_module}`."
    app.command(_command, context_settings=_PASS_ON, help=_help)(_become)
