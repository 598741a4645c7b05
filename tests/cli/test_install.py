"""What a user does first: the README's `make demo`, and a client installed alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import client

ROOT = Path(__file__).parents[2]
PACKAGED = (
    "paceline",
    "draft_service",
    "target_service",
    "coordinator",
    "paceline_gateway",
    "paceline_lab",
    "paceline_ray",
    "paceline_training",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    # Not the variables of the `make` that runs this test: a make below it is a make of its own.
    plain = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    done = subprocess.run(command, cwd=cwd, env=plain | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def readme_commands() -> list[str]:
    """The commands of the README's first code block."""
    block = re.search(r"```(?:sh|bash)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    return [line.partition("#")[0].strip() for line in block.group(1).splitlines() if line.strip()]


def test_readme_opens_with_the_two_commands() -> None:
    assert readme_commands() == ["make demo", "make test"]


def test_readme_imports_what_the_client_exports() -> None:
    (names,) = re.findall(r"^from paceline\.client import (.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert set(names.split(", ")) <= set(client.__all__)
    assert all(hasattr(client, name) for name in client.__all__)


@pytest.mark.real_model
@pytest.mark.timeout(600)
def test_the_readmes_demo() -> None:
    out = run("sh", "-c", readme_commands()[0], TERM="xterm", FORCE_COLOR="1", COLUMNS="100")
    assert "\x1b[32m" in out, "accepted tokens are green"
    assert "mean acceptance length" in out
    assert re.search(r"with speculation +[\d.]+ tokens per second", out)
    assert re.search(r"target-only +[\d.]+ tokens per second, the same tokens", out)


@pytest.mark.timeout(600)
def test_a_built_wheel_is_the_client_without_torch(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in PACKAGED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, source, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", wheel, cwd=tmp_path)
    assert run(python, "-c", "from paceline.client import AsyncClient, Client; print(Client)", cwd=tmp_path)
    missing = "import importlib.util as u; print([u.find_spec(n) is None for n in ('torch', 'numpy', 'numba')])"
    assert run(python, "-c", missing, cwd=tmp_path).strip() == "[True, True, True]"
    paceline = tmp_path / "venv" / "bin" / "paceline"
    assert "generate" in run(paceline, "--help", cwd=tmp_path)
    for command, lacks, extra in (("serve", "engine", "engine"), ("bench load", "benchmarks", "bench")):
        refused = subprocess.run(
            [paceline, *command.split()], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert refused.returncode == 1
        said = f"`paceline {command}` needs the {lacks}: pip install 'paceline[{extra}]'"
        assert refused.stderr == f"paceline: error: {said}\n"
