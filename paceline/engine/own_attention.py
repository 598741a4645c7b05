"""Attention modules of transformers that compute attention in code of their own: Bloom's, MPT's and Falcon's.

Within a packed pass they hand their queries, keys and values to its attender as all others do; otherwise they run as
transformers made them, so that a plain forward pass stays what checks compare with. The masks that their models make
in a packed pass are ignored.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedModel

from paceline.engine.forward import ATTENTION_NAME, AttentionCall, attend, is_attending
from paceline.protocol.errors import Unsupported

ALIBI = "alibi"
"""Key of a call's extras: a slope for each query head; times a key's position it is a bias of the key's score."""


@contextmanager
def attention_of(model: PreTrainedModel, name: str) -> Iterator[bool]:
    """Have a model call an attention function of transformers' interface, and ours again afterwards.

    Yields:
        Whether it does so, or computes attention in code of its own that is known here.
    """
    if any(type(module).__name__ in OWN_ATTENTION for module in model.modules()):
        yield True
        return
    model.set_attn_implementation(name)
    try:
        yield model.config.get_text_config()._attn_implementation == name
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


def open_own_attention(model: PreTrainedModel) -> None:
    """Have a model's own attention call ours in packed passes. Harmless when repeated.

    Raises:
        Unsupported: a form of it that isn't known.
    """
    for module in model.modules():
        compute = OWN_ATTENTION.get(type(module).__name__)
        if compute is not None:
            own = type(module).forward.__get__(module)
            module.forward = partial(_forward, compute, own, module, _slopes(module, model.config))


def _forward(
    compute: Callable[..., Any],
    own: Callable[..., Any],
    module: Any,
    extras: Mapping[str, Any],
    hidden: torch.Tensor,
    *arguments: Any,
    **others: Any,
) -> Any:
    if not is_attending():
        return own(hidden, *arguments, **others)
    return compute(module, extras, hidden, *arguments, **others), None


def _slopes(module: Any, config: Any) -> Mapping[str, Any]:
    """What a module's calls add: its heads' slopes, as the library's own biases have them."""
    kind, weight = type(module).__name__, next(module.parameters())
    if kind == "FalconAttention":
        if config.alibi:
            raise Unsupported(f"{kind}: alibi = true: transformers' own attentions differ in it")
        return MappingProxyType({})
    library = sys.modules[type(module).__module__]
    if kind == "BloomAttention":
        biases = library.build_alibi_tensor(torch.ones((1, 2)), module.num_heads, torch.float32)
    else:
        biases = library.build_mpt_alibi_tensor(module.n_heads, 2)
    return MappingProxyType({ALIBI: (biases[:, 0, 1] - biases[:, 0, 0]).to(weight.device)})


def _bloom(
    module: Any, extras: Mapping[str, Any], hidden: torch.Tensor, residual: torch.Tensor, *_: Any, **__: Any
) -> Any:
    query, key, value = module._reshape(module.query_key_value(hidden))
    output = attend(AttentionCall(module, query, key, value, module.inv_norm_factor, extras))
    return residual + module.dense(output.flatten(2))


def _mpt(module: Any, extras: Mapping[str, Any], hidden: torch.Tensor, *_: Any, **__: Any) -> Any:
    projection = module.Wqkv(hidden)
    if module.clip_qkv:
        projection = projection.clamp(-module.clip_qkv, module.clip_qkv)
    query, key, value = (
        each.unflatten(2, (module.n_heads, -1)).transpose(1, 2) for each in projection.chunk(3, dim=2)
    )
    output = attend(AttentionCall(module, query, key, value, module.softmax_scale, extras))
    return module.out_proj(output.flatten(2))


def _falcon(
    module: Any,
    extras: Mapping[str, Any],
    hidden: torch.Tensor,
    *_: Any,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    **__: Any,
) -> Any:
    query, key, value = (each.transpose(1, 2) for each in module._split_heads(module.query_key_value(hidden)))
    # The new architecture repeats each key for the heads that share it.
    apart = key.shape[1] // module.num_kv_heads
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    query, key = rotate(query, key[:, ::apart], *position_embeddings)
    scaling = 1 / math.sqrt(module.head_dim)
    output = attend(AttentionCall(module, query, key, value[:, ::apart], scaling, extras))
    return module.dense(output.flatten(2))


OWN_ATTENTION = MappingProxyType({"BloomAttention": _bloom, "MptAttention": _mpt, "FalconAttention": _falcon})
"""By the name of their class, how such modules compute in a packed pass."""
