"""Paceline's drafts behind a vLLM server: `docs/vllm.md`. Nothing here imports torch; vLLM imports this."""

from paceline_vllm.proposer import DraftProposer

__all__ = ["DraftProposer"]
