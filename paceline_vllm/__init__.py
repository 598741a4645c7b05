"""Paceline's drafts and draws in a vLLM server: `docs/vllm.md`. `coupled` alone imports torch and vLLM."""

from paceline_vllm.proposer import DraftProposer

__all__ = ["DraftProposer"]
