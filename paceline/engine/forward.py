"""One forward pass of a transformers decoder over packed rows, with attention that is ours."""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

ATTENTION_NAME = "paceline_packed"


class Attender(Protocol):
    """What computes attention during one forward pass."""

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,  # [1, heads, rows, head_dim]
        key: torch.Tensor,  # [1, kv_heads, rows, head_dim]
        value: torch.Tensor,  # [1, kv_heads, rows, head_dim]
        scaling: float | None,
        extras: dict[str, Any],
    ) -> torch.Tensor:  # [1, rows, heads, head_dim]
        """Attention of one layer; `extras` holds what else the model passed."""


_ATTENDER: ContextVar[Attender] = ContextVar("paceline_attender")


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    assert attention_mask is None, "transformers made a mask for an attention function that is ours"
    return _ATTENDER.get().attend(module, query, key, value, scaling, extras), None


def attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Attention of one layer in the running forward pass; shapes as in `Attender`."""
    return _ATTENDER.get().attend(module, query, key, value, scaling, {})


def packed_forward(
    model: PreTrainedModel, attender: Attender, token_ids: list[int], positions: list[int], logit_rows: list[int]
) -> torch.Tensor:
    """Run one packed forward pass; returns logits [len(logit_rows), tensor width]."""
    device = model.device
    return forward(
        model,
        attender,
        torch.tensor([token_ids], dtype=torch.long, device=device),
        torch.tensor([positions], dtype=torch.long, device=device),
        torch.tensor(logit_rows, dtype=torch.long, device=device),
    )


def forward(
    model: PreTrainedModel,
    attender: Attender,
    token_ids: torch.Tensor,  # [1, rows]
    positions: torch.Tensor,  # [1, rows]
    wanted: torch.Tensor,  # [n] rows
) -> torch.Tensor:  # [n, tensor width]
    """Run one forward pass on what is on the device already; makes no tensor on the host."""
    arguments: dict[str, Any] = {"logits_to_keep": wanted} if _keeps_logits(model) else {}
    token = _ATTENDER.set(attender)
    try:
        logits: torch.Tensor = model(
            input_ids=token_ids,
            position_ids=positions,
            use_cache=False,
            **arguments,
        ).logits[0]
    finally:
        _ATTENDER.reset(token)
    return logits if arguments else logits[wanted]


def _keeps_logits(model: PreTrainedModel) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters
