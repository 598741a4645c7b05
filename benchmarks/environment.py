"""What a report must say about the machine and the software that made it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

PACKAGES = ("torch", "transformers", "grpcio", "numpy", "numba")


def describe() -> dict[str, str]:
    """Command, commit, hardware and versions, each in words."""
    facts = {
        "command": " ".join(["python", "-m", _module(), *sys.argv[1:]]),
        "commit": _commit(),
        "machine": f"{_processor()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
    facts |= {package: importlib.metadata.version(package) for package in PACKAGES}
    return facts


def as_markdown(facts: dict[str, str]) -> str:
    """One bullet a fact."""
    return "".join(f"- {name}: {value}\n" for name, value in facts.items())


def _module() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec else sys.argv[0]


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
