"""What a report must say about the machine and the software that made it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

PACKAGES = ("torch", "transformers", "grpcio", "numpy", "numba")


def describe() -> dict[str, str]:
    """Command, commit, hardware and versions, each in words; the user's home folder is written `~`."""
    facts = {
        "command": " ".join([*_program(), *sys.argv[1:]]).replace(str(Path.home()), "~"),
        "commit": _commit(),
        "machine": f"{_processor()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
    facts |= {package: importlib.metadata.version(package) for package in PACKAGES}
    return facts


def as_markdown(facts: Mapping[str, str]) -> str:
    """One bullet a fact."""
    return "".join(f"- {name}: {value}\n" for name, value in facts.items())


def load_average() -> str:
    """Running processes over the last minute; other work on the machine shows here."""
    return f"{os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else "unknown"


def _program() -> list[str]:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return ["python", "-m", spec.name] if spec else [Path(sys.argv[0]).name]


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    here = Path(__file__).parent
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=here)
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
