"""Paceline's drafts in an SGLang server: `docs/sglang.md`. `trees` alone imports nothing of SGLang's."""

from __future__ import annotations

from typing import Any

ALGORITHM = "PACELINE"
"""What `--speculative-algorithm` names."""


def register() -> None:
    """Make the algorithm known. SGLang calls this in each of its processes (entry point `sglang.srt.plugins`)."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from paceline_sglang.algorithm import DraftServiceAlgorithm

    SpeculativeAlgorithm.register(ALGORITHM, supports_overlap=True, spec_class=DraftServiceAlgorithm)(_worker_kind)


def _worker_kind(server_args: Any) -> type:
    from paceline_sglang.worker import DraftServiceWorker

    return DraftServiceWorker
