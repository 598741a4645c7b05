"""`paceline config …`: the services' settings, without starting one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, get_args

import typer

from paceline.cli.support import example
from paceline.drafters.names import check_drafters
from paceline.local.settings import ServeSettings, check_settings
from paceline.runtime.config import CoordinatorConfig, DraftConfig, TargetConfig
from paceline.runtime.fields import every_setting
from paceline.runtime.gateway_config import GatewayConfig
from paceline.runtime.options import parse
from paceline.runtime.sources import SourcedConfig, config_text

config = typer.Typer(help="The services' settings: shown, checked, described.", no_args_is_help=True)

ProgramName = Literal["target-service", "draft-service", "coordinator", "gateway", "serve"]
Program = Annotated[ProgramName, typer.Argument(help="The service whose settings are meant.")]
PROGRAMS: Mapping[ProgramName, type[Any]] = dict(
    zip(
        get_args(ProgramName),
        (TargetConfig, DraftConfig, CoordinatorConfig, GatewayConfig, ServeSettings),
        strict=True,
    )
)
_CHECKS: Mapping[ProgramName, Callable[[Any], None]] = {
    "draft-service": lambda settings: check_drafters(settings.drafters),
    "serve": check_settings,
}
_TAKES_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True}
SCHEMA = "https://json-schema.org/draft/2020-12/schema"


@config.command(
    context_settings=_TAKES_FLAGS,
    epilog=example("paceline config show target-service --config target.toml --threads 4"),
)
def show(context: typer.Context, service: Program) -> None:
    """Print the settings in force as TOML, each with its source; takes the service's own flags."""
    typer.echo(config_text(_load(context, service), every_setting(PROGRAMS[service])), nl=False)


@config.command(
    context_settings=_TAKES_FLAGS,
    epilog=example("paceline config check coordinator --config coordinator.toml"),
)
def check(context: typer.Context, service: Program) -> None:
    """Check the settings, and name the first invalid one; takes the service's own flags."""
    sources = _load(context, service).sources
    typer.echo(f"valid: {service}, {len(sources)} settings given")


@config.command(epilog=example("paceline config schema target-service > target.schema.json"))
def schema(service: Program) -> None:
    """Print the JSON schema of the service's TOML file."""
    typer.echo(json.dumps({"$schema": SCHEMA} | PROGRAMS[service].model_json_schema(), indent=2))


def _load(context: typer.Context, service: ProgramName) -> SourcedConfig[Any]:
    """The settings that the service would run with, from the same flags, variables and file.

    Raises:
        InvalidInput: naming the key or variable, its value, the limit and the source.
    """
    settings = parse(PROGRAMS[service], f"The settings of {service}.", context.args, os.environ)
    _CHECKS.get(service, lambda settings: None)(settings.config)
    return settings
