"""What this machine computes with."""

from __future__ import annotations

import platform
from pathlib import Path


def processor_name() -> str:
    """The processor's own name, or what the platform calls it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
