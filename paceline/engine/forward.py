"""One forward pass of a transformers decoder over packed rows, with attention that is ours.

All rows of a pass form one sequence of a batch of one, with explicit position ids. Everything in a decoder but
attention treats rows alone, so attention is the only part that is replaced: a function registered with
transformers' attention interface hands each layer's queries, keys and values to the pass's `Attender`. The
library makes no mask for attention functions that it doesn't know, so nothing of its own mixes sessions.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from transformers import AttentionInterface, PreTrainedModel

ATTENTION_NAME = "paceline_packed"
"""Name of our attention function for `set_attn_implementation`."""


PLACE = "paceline_place"
"""Attribute of an attention module: its number among the layers that attend, where others don't."""


class _NoMask:
    """What a module that takes a part of its mask is handed where there is none."""

    def __getitem__(self, part: Any) -> _NoMask:
        return self


NO_MASK = _NoMask()


class AttentionCall(NamedTuple):
    """One layer's call of attention."""

    module: torch.nn.Module
    query: torch.Tensor  # [1, heads, rows, head_dim]
    key: torch.Tensor  # [1, kv_heads, rows, head_dim]
    value: torch.Tensor  # [1, kv_heads, rows, head_dim]
    scaling: float | None  # of the scores; None: 1 / sqrt(head_dim)
    extras: Mapping[str, Any] = MappingProxyType({})  # what else the model passed

    @property
    def layer(self) -> int:
        """Number of the layer, among those that attend."""
        layer = getattr(self.module, PLACE, None)
        layer = self.module.layer_idx if layer is None else layer
        assert isinstance(layer, int)
        return layer


class Attender(Protocol):
    """Computes attention during one forward pass."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Attention of one layer: [1, rows, heads, head_dim]."""


class SelfAttention:
    """Attends every row to itself, where only shapes matter."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """As `Attender`."""
        groups = call.query.shape[1] // call.value.shape[1]
        return call.value.repeat_interleave(groups, dim=1).transpose(1, 2)


_ATTENDER: ContextVar[Attender] = ContextVar("paceline_attender")


@contextmanager
def attending(attender: Attender) -> Iterator[None]:
    """Have `attender` compute the attention of what is run meanwhile."""
    token = _ATTENDER.set(attender)
    try:
        yield
    finally:
        _ATTENDER.reset(token)


def is_attending() -> bool:
    """Whether a packed forward pass runs."""
    return _ATTENDER.get(None) is not None


def current_attender() -> Attender:
    """The attender of the running forward pass."""
    return _ATTENDER.get()


def attend(call: AttentionCall) -> torch.Tensor:
    """Attention of one layer in the running forward pass."""
    return _ATTENDER.get().attend(call)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: _NoMask | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers calls it."""
    assert attention_mask in (None, NO_MASK), "transformers made a mask for an attention function that is ours"
    return attend(AttentionCall(module, query, key, value, scaling, extras)), None


AttentionInterface.register(ATTENTION_NAME, _attention)


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
    logit_rows: torch.Tensor,  # [n] rows
) -> torch.Tensor:  # [n, tensor width]
    """Run one forward pass on what is on the device already; makes no tensor on the host."""
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    arguments: dict[str, Any] = {"logits_to_keep": logit_rows} if keeps else {}
    with attending(attender):
        logits: torch.Tensor = model(
            input_ids=token_ids, position_ids=positions, use_cache=False, **arguments
        ).logits[0]
    return logits if keeps else logits[logit_rows]
