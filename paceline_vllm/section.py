"""Our part of vLLM's `--additional-config`."""

from __future__ import annotations

from typing import Any

SECTION = "paceline"
"""The key below which the `DraftClientSettings` are."""


def section_of(vllm_config: Any) -> dict[str, Any]:
    """The settings below `paceline`; empty: there are none."""
    further = vllm_config.additional_config
    return dict(further.get(SECTION, {})) if isinstance(further, dict) else {}
