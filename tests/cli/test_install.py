"""What a user does first: the README's `make demo`, and what a release installs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

from paceline import client
from tools.constraints import pinned_versions

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "paceline",
    "draft_service",
    "target_service",
    "coordinator",
    "paceline_gateway",
    "paceline_lab",
    "paceline_ray",
    "paceline_sglang",
    "paceline_training",
    "paceline_vllm",
)
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
LARGEST_WHEEL = 2_000_000


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
    few = "--temperature 0 --max-new-tokens 32"
    out = run("sh", "-c", readme_commands()[0], TERM="xterm", FORCE_COLOR="1", COLUMNS="100", DEMO_FLAGS=few)
    assert "\x1b[32m" in out, "accepted tokens are green"
    assert "mean acceptance length" in out
    assert re.search(r"with speculation +[\d.]+ tokens per second", out)
    assert re.search(r"target-only +[\d.]+ tokens per second, the same tokens", out)


def names_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def build(project: Path, folder: Path, *only: str) -> Path:
    """Build as `make dist` does, with this environment's setuptools; return the wheel."""
    run(sys.executable, "-m", "build", "--no-isolation", *only, "--outdir", folder, project)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git tracks or would, since building writes beside the source."""
    folder = tmp_path_factory.mktemp("checkout")
    tracked = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    for name in filter(None, tracked):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(checkout, tmp_path_factory.mktemp("built"), "--wheel")


@pytest.fixture(scope="module")
def client_folder(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel beside what it requires without extras, and nothing else."""
    folder = tmp_path_factory.mktemp("client")
    pip = (
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
    )
    run(*pip, "--no-compile", "--target", folder, wheel)
    for name in pinned_versions("paceline", ()):
        required = distribution(name)
        for top in {file.parts[0] for file in required.files or ()} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(required.locate_file(top))))
    return folder


def installed(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with the modules of a folder and no site-packages."""
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-S", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_wheel_holds_the_packages_and_no_weights(wheel: Path) -> None:
    names = names_of(wheel)
    assert wheel.stat().st_size < LARGEST_WHEEL
    assert {name.partition("/")[0] for name in names} == {*PACKAGES, f"paceline-{VERSION}.dist-info"}
    assert {"paceline/py.typed", "paceline/v1/types_pb2.pyi", "paceline_gateway/page/index.html"} < names


@pytest.mark.full
def test_the_source_makes_the_same_wheel_and_holds_no_weights(checkout: Path, wheel: Path, tmp_path: Path) -> None:
    assert names_of(build(checkout, tmp_path)) == names_of(wheel)
    (source,) = tmp_path.glob("*.tar.gz")
    assert source.stat().st_size < LARGEST_WHEEL
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    made = {"PKG-INFO", "setup.cfg", "paceline.egg-info"}
    told = {"pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "buf.yaml", "protos"}
    assert {name.partition("/")[0] for name in names if name} == {*PACKAGES, *made, *told}
    assert not any(name.endswith((".safetensors", ".bin", ".pt")) for name in names)


@pytest.mark.full
def test_the_drafts_wheel_holds_every_draft_whole(checkout: Path, tmp_path: Path) -> None:
    names = names_of(build(checkout / "drafts", tmp_path))
    package = checkout / "drafts" / "paceline_drafts"
    tracked = {f"paceline_drafts/{file.relative_to(package)}" for file in package.rglob("*") if file.is_file()}
    assert {name for name in names if ".dist-info/" not in name} == tracked
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_an_installed_client_runs_without_torch(client_folder: Path) -> None:
    paceline = str(client_folder / "bin" / "paceline")
    assert installed(client_folder, paceline, "--version").stdout == f"paceline {VERSION}\n"
    assert "generate" in installed(client_folder, paceline, "--help").stdout
    missing = "import importlib.util as u; print([u.find_spec(n) is None for n in ('torch', 'numpy', 'numba')])"
    code = f"from paceline.client import AsyncClient, Client; print(Client); {missing}"
    shown, absent = installed(client_folder, "-c", code).stdout.splitlines()
    assert "paceline.client" in shown
    assert absent == "[True, True, True]"


@pytest.mark.parametrize(
    ("command", "arguments", "lacks", "extra"),
    [
        pytest.param("serve", [], "engine", "engine", marks=pytest.mark.full),
        ("bench ab", ["http"], "benchmarks", "bench"),
    ],
)
def test_an_installed_client_says_what_it_lacks(
    client_folder: Path, command: str, arguments: list[str], lacks: str, extra: str
) -> None:
    refused = installed(client_folder, str(client_folder / "bin" / "paceline"), *command.split(), *arguments)
    assert refused.returncode == 1
    said = f"`paceline {command}` needs the {lacks}: pip install 'paceline[{extra}]'"
    assert refused.stderr == f"paceline: error: {said}\n"
