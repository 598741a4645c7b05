"""Paceline's drafts and draws in a vLLM server: `docs/vllm.md`.

`coupled` and `speculator` alone import torch and vLLM, and nothing is imported before it is asked for: vLLM loads
`plugin` in every process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline_vllm.proposer import DraftProposer

__all__ = ["DraftProposer"]


def __getattr__(name: str) -> Any:
    if name != "DraftProposer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from paceline_vllm.proposer import DraftProposer

    return DraftProposer
