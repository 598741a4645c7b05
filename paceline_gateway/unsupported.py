"""The error for what a request asks for and this server, or the served model, can't do."""

from __future__ import annotations

from paceline.protocol.errors import Unsupported


def unsupported(field: str, why: str) -> Unsupported:
    """Names the field, also for the error's `param`."""
    return Unsupported(f"{field}: {why}", metadata={"field": field})
