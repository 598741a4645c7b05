"""`paceline ray`: the services as actors of a Ray cluster."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib import util
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.support import example, need_engine
from paceline.local.service_process import ProcessName
from paceline.local.settings import missing_packages
from paceline.protocol.errors import PacelineError, require
from paceline.runtime.config import DEFAULT_MODEL
from paceline.runtime.options import takes_settings
from paceline.runtime.process import signals_interrupt
from paceline_ray.records import WITHOUT_ROOM
from paceline_ray.settings import DEFAULT_NAME, NOT_ON_RAY, ConfigFiles, RaySettings, plan_deployment

if TYPE_CHECKING:
    from paceline_ray.deployments import RunningDeployment
    from paceline_ray.records import ActorStatus

START_SECONDS = 600.0
WATCH_SECONDS = 2.0

ray = typer.Typer(name="ray", help="Run the services as actors of a Ray cluster.", no_args_is_help=True)
Address = Annotated[
    str, typer.Option(help="The cluster: HOST:PORT, or auto for one that runs on this machine.", envvar="RAY_ADDRESS")
]
Name = Annotated[str, typer.Option(help="The deployment's name.")]
Wait = Annotated[float, typer.Option(help="Seconds that the services may take until they serve.")]


@ray.command(
    epilog=example(
        "paceline ray up smollm2-135m",
        "paceline ray up smollm2-135m --address auto --drafts 4 --draft-gpus 0.25 -tp 2",
    )
)
@takes_settings(RaySettings, without=("model", *NOT_ON_RAY))
def up(
    model: Annotated[
        str, typer.Argument(help="A model that every node finds: a name, a Hugging Face id or a path.")
    ] = DEFAULT_MODEL,
    address: Annotated[
        str | None,
        typer.Option(
            help="A running cluster: HOST:PORT or auto.", envvar="RAY_ADDRESS", show_default="a new local one"
        ),
    ] = None,
    target_config: Annotated[Path | None, typer.Option(help="TOML file of the targets; flags override it.")] = None,
    draft_config: Annotated[Path | None, typer.Option(help="TOML file of the draft services.")] = None,
    coordinator_config: Annotated[Path | None, typer.Option(help="TOML file of the coordinators.")] = None,
    wait_seconds: Wait = START_SECONDS,
    block: Annotated[bool, typer.Option(help="Stay, and take the deployment down on Ctrl-C or SIGTERM.")] = False,
    **flags: Any,
) -> None:
    """Deploy targets, draft services, coordinators and HTTP, and wait until all that Ray can place serve."""
    need_ray("up")
    settings = _with_http(RaySettings(model=model, **flags))
    files = ConfigFiles(target_config, draft_config, coordinator_config)
    plan_deployment(settings, files, cluster_has_gpus=False)
    from paceline_ray.deployments import LOCAL, RunningDeployment, cluster_driver, cluster_has_gpus

    own = address in (None, LOCAL)
    with cluster_driver(address) as cluster, _interruptible():
        typer.echo(f"cluster {cluster}")
        deployment = plan_deployment(settings, files, cluster_has_gpus=cluster_has_gpus(), on_one_machine=own)
        running = RunningDeployment.start(deployment)
        # A local cluster ends with this process.
        stays = block or own
        with _teardown(running, always=stays):
            _show(running.await_serving(wait_seconds, _announce, cluster_may_grow=not own))
            if stays:
                with contextlib.suppress(KeyboardInterrupt):
                    typer.echo("Ctrl-C takes it down")
                    _watch(running)


@ray.command(epilog=example("paceline ray status", "paceline ray status --json"))
def status(
    address: Address = "auto",
    name: Name = DEFAULT_NAME,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list.")] = False,
) -> None:
    """Show every actor of a deployment: its state, endpoint, node, process and restarts."""
    with _find_deployment(address, name) as running:
        lines = running.status()
        if as_json:
            typer.echo(json.dumps([asdict(line) for line in lines]))
        else:
            _show(lines)


@ray.command(epilog=example("paceline ray scale --drafts 4", "paceline ray scale --coordinators 2 --drafts 1"))
def scale(
    drafts: Annotated[int | None, typer.Option(help="Draft services to have.")] = None,
    coordinators: Annotated[int | None, typer.Option(help="Coordinators to have.")] = None,
    gateways: Annotated[int | None, typer.Option(help="HTTP gateways to have.")] = None,
    address: Address = "auto",
    name: Name = DEFAULT_NAME,
    wait_seconds: Wait = START_SECONDS,
) -> None:
    """Add services, or drain and remove some; running requests go on."""
    counts: dict[ProcessName, int | None] = {"draft": drafts, "coordinator": coordinators, "gateway": gateways}
    new_counts = {role: count for role, count in counts.items() if count is not None}
    require(bool(new_counts), "drafts", drafts, "given, or --coordinators or --gateways")
    with _find_deployment(address, name) as running:
        for role, count in new_counts.items():
            running.scale(role, count)
        _show(running.await_serving(wait_seconds, lambda line: None))


@ray.command(epilog=example("paceline ray down"))
def down(address: Address = "auto", name: Name = DEFAULT_NAME) -> None:
    """Drain every service of a deployment and remove it; the cluster stays."""
    with _find_deployment(address, name) as running:
        running.down()
    typer.echo(f"{name} is down")


def need_ray(command: str) -> None:
    """Refuse a command that this installation is too small for.

    Raises:
        PacelineError: saying what to install.
    """
    need_engine(f"ray {command}")
    if util.find_spec("ray") is None:
        raise PacelineError(f"`paceline ray {command}` needs Ray: pip install 'paceline[engine,ray]'")


def _with_http(settings: RaySettings) -> RaySettings:
    """The settings, without HTTP where its packages are missing and no flag asks for it."""
    missing = missing_packages() if settings.http else []
    if not missing:
        return settings
    lack = f"HTTP needs {', '.join(missing)}: pip install 'paceline[http]'"
    if settings.insists_on_http:
        raise PacelineError(lack)
    typer.echo(f"no HTTP: {lack}")
    return settings.model_copy(update={"http": False})


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    # Ray has its own handler of SIGTERM, which would leave at once.
    with contextlib.suppress(KeyboardInterrupt), signals_interrupt():
        yield


@contextlib.contextmanager
def _find_deployment(address: str, name: str) -> Iterator[RunningDeployment]:
    need_ray("status")
    from paceline_ray.deployments import RunningDeployment, cluster_driver

    with cluster_driver(address):
        yield RunningDeployment.find(name)


@contextlib.contextmanager
def _teardown(running: RunningDeployment, *, always: bool) -> Iterator[None]:
    """Take the deployment down at the end of the context, or only when it fails."""
    try:
        yield
    except BaseException:
        running.down()
        raise
    if always:
        running.down()
        typer.echo(f"{running.name} is down")


def _watch(running: RunningDeployment) -> None:
    """Print changes until interrupted."""
    previous = {line.name: line for line in running.status()}
    while True:
        time.sleep(WATCH_SECONDS)
        current = {line.name: line for line in running.status()}
        for name, line in current.items():
            if line != previous.get(name):
                _announce(line)
        for name in previous.keys() - current.keys():
            typer.echo(f"{name}  removed")
        previous = current


def _announce(line: ActorStatus) -> None:
    parts = (line.name, line.state, line.address, line.node, f"pid {line.pid}" if line.pid else "", line.detail)
    typer.echo("  ".join(part for part in parts if part))


def _show(lines: Sequence[ActorStatus]) -> None:
    for line in lines:
        where = f"{line.address or '-':<24} {line.node:<16} pid {line.pid or '-'}"
        restarts = f"  {line.restarts} restarts" if line.restarts else ""
        typer.echo(f"{line.name:<32} {line.state:<12} {where}{restarts}{f'  {line.detail}' if line.detail else ''}")
    for role, those in groupby(lines, lambda line: line.role):
        _show_lack(role, list(those))
    for line in lines:
        if line.role == "coordinator" and line.address:
            typer.echo(f'ready: paceline generate --prompt "Once upon a time" --coordinator {line.address}')
        if line.role == "gateway" and line.address:
            typer.echo(f"OpenAI's API: http://{line.address}/v1")


def _show_lack(role: ProcessName, lines: Sequence[ActorStatus]) -> None:
    """Print how many services of a role wait for room, and which resources they need."""
    lacks = [line for line in lines if line.state == WITHOUT_ROOM]
    if lacks:
        number = f"{len(lacks)} of {len(lines)} {role}{' services' if role == 'draft' else 's'}"
        each = f"{'waits' if len(lacks) == 1 else 'each wait'}{lacks[-1].detail.removeprefix('waits')}"
        typer.echo(f"{number} {each}")
