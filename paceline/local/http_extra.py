"""Whether this installation can serve HTTP."""

from __future__ import annotations

from importlib import util

PACKAGES = ("fastapi", "httptools", "uvicorn")
"""Of the extra `http`."""


def missing_packages() -> list[str]:
    """Those that are not installed."""
    return [package for package in PACKAGES if util.find_spec(package) is None]
