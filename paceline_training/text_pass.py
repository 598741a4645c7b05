"""A model's pass over one whole text, through the same hook as the engine, with gradients."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional
from transformers import PreTrainedModel

from paceline.engine.attention import SINKS, SOFTCAP, packed_attention
from paceline.engine.forward import AttentionCall, packed_forward
from paceline_training.corpus import Row


class _WholeText:
    """Causal attention of one whole text; chunks (Llama 4) are left out, since a draft may err."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        (_, heads, rows, width), kv_heads = call.query.shape, call.key.shape[1]
        window: int = call.extras.get("sliding_window") or rows
        if window >= rows and not any(call.extras.get(term) is not None for term in (SOFTCAP, SINKS)):
            output = functional.scaled_dot_product_attention(
                call.query, call.key, call.value, is_causal=True, scale=call.scaling, enable_gqa=heads != kv_heads
            )
            return output.transpose(1, 2)
        packed_query = call.query.reshape(1, kv_heads, heads // kv_heads * rows, width)
        mask = _window_mask(rows, window, call.query).repeat(heads // kv_heads, 1)
        output = packed_attention(call, packed_query, call.key, call.value, mask)
        return output.reshape(1, heads, rows, -1).transpose(1, 2)


def _window_mask(rows: int, window: int, like: torch.Tensor) -> torch.Tensor:
    """Additive [rows, rows]: a row sees itself and the `window` - 1 rows before it."""
    at = torch.arange(rows, device=like.device)
    back = at[:, None] - at
    return like.new_zeros((rows, rows)).masked_fill_((back < 0) | (back >= window), float("-inf"))


def learned_logits(model: PreTrainedModel, row: Row) -> torch.Tensor:
    """Logits of a text's learned positions, with gradients where the model has them.

    Each comes from the token before it, so the text's last token needs no row, and its first is never learned.

    Returns:
        [positions, head width].
    """
    tokens = row.token_ids[:-1].tolist()
    logit_rows = np.flatnonzero(row.loss_mask[1:]).tolist()
    return packed_forward(model, _WholeText(), tokens, [*range(len(tokens))], logit_rows)
