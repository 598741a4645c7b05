"""Facts of a decoder's attention layers, and attention in the library's products.

How far back a row sees is a matter of positions, never of KV rows: a row of a tree has the position of its depth,
and its neighbours among the KV rows may have the same one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from paceline.engine.forward import AttentionCall
from paceline.engine.interface import StepItem
from paceline.engine.kv import KVShape
from paceline.engine.ledger import key_positions
from paceline.engine.mixers import Mixer, state_bytes
from paceline.sampling.tree import ancestor_mask

SOFTCAP = "softcap"
"""Key of a call's extras: scores are capped softly (Gemma 2, arXiv 2408.00118, section 2)."""
SINKS = "s_aux"
"""Key of a call's extras: a score of each query head that takes its share of the softmax and has no value (gpt-oss,
arXiv 2508.10925, section 2.1)."""
PRODUCT_COPIES = 4
"""Copies of one layer's scores that exist while it attends with a soft-cap or sinks, at most."""

Positions = int | Sequence[int] | NDArray[np.int64]


@dataclass(frozen=True)
class Horizon:
    """For each position the first that a row there sees; it sees all from there to its own.

    Attributes:
        size: positions of a window, which ends at the row's own; or of a chunk.
        chunked: whether rows see their own chunk alone, of those that follow each other from position 0 on.
    """

    size: int
    is_chunked: bool = False

    def __getitem__(self, positions: Positions) -> NDArray[np.int64]:
        """The first position that rows at these see."""
        own = np.asarray(positions, np.int64)
        return own // self.size * self.size if self.is_chunked else np.maximum(own - self.size + 1, 0)


@dataclass(frozen=True, eq=False)
class LayerKind:
    """A kind of layers, which share one mask. `horizon` None: rows see all that lies before them."""

    horizon: Horizon | None
    groups: int


@dataclass(frozen=True, eq=False)
class AttentionFacts:
    """Facts of a decoder's attention layers."""

    shape: KVShape
    kinds: tuple[LayerKind, ...]
    kind_of_layer: tuple[int, ...]
    """Each layer's kind."""
    terms: frozenset[str] = frozenset()
    """What else scores or keys depend on in any layer, as extras of its calls."""
    mixers: tuple[Mixer, ...] = ()
    """The recurrent layers beside them."""

    @property
    def session_rows(self) -> int:
        """KV rows whose room a session's states take."""
        return -(-state_bytes(self.mixers, self.shape.dtype.itemsize) // self.shape.row_bytes)

    @property
    def has_windows(self) -> bool:
        """Whether any layer's rows see less than all that lies before them."""
        return any(kind.horizon is not None for kind in self.kinds)

    @property
    def compilable(self) -> bool:
        """Whether loops and shapes for plain attention compute it, apart from windows."""
        return not self.uncompilable

    @property
    def uncompilable(self) -> str:
        """The features that such loops and shapes lack, in words; empty: none."""
        if self.terms:
            return f"attention with {' and '.join(sorted(self.terms))}"
        return "" if self.shape.uniform_layer is not None else "keys and values, or layers, of different shapes"


def whole_context(shape: KVShape) -> AttentionFacts:
    """Plain attention: every layer sees everything."""
    counts = sorted({layer.groups for layer in shape.layers})
    kinds = tuple(LayerKind(None, groups) for groups in counts)
    return AttentionFacts(shape, kinds, tuple(counts.index(layer.groups) for layer in shape.layers))


@dataclass(frozen=True)
class View:
    """The keys of a session that its new rows see in layers of one kind: none before `first`."""

    first: int
    mask: torch.Tensor | None = None  # [groups · new, total - first] additive; None: all, or as `causal` says
    causal: bool = False


def view_of(item: StepItem, kind: LayerKind, shape: KVShape, *, causal: bool = True) -> View:
    """The keys that an item's new rows see in layers of a kind; `causal`: allows causal attention without a mask."""
    new, chain = len(item.token_ids), item.is_chain
    first, uneven = _first_visible(item, kind.horizon)
    if causal and chain and item.base_length == 0 and new > 1 and not (first or uneven):
        return View(0, causal=True)
    if new == 1 and not uneven and (chain or not item.kept_tree):
        return View(first)
    visible = visible_keys(item, kind.horizon, first)
    mask = torch.zeros(visible.shape, dtype=shape.dtype).masked_fill_(torch.from_numpy(~visible), float("-inf"))
    return View(first, mask.to(shape.device).repeat(kind.groups, 1))


def _first_visible(item: StepItem, horizon: Horizon | None) -> tuple[int, bool]:
    """The first key that any new row sees, at most the trunk's end; and whether another row's first is another."""
    if horizon is None:
        return 0, False
    firsts = horizon[key_positions(item)[item.base_length :]]
    first = min(int(firsts.min()), item.trunk)
    return first, bool((firsts > first).any())


def visible_keys(item: StepItem, horizon: Horizon | None, first: int = 0) -> NDArray[np.bool_]:
    """A row sees the trunk, its ancestors and itself, none of them before the horizon of its position.

    `first`: only keys from this one on are returned, [new, base + new - first]; at most the trunk's end.
    """
    new = len(item.token_ids)
    visible = np.ones((new, item.base_length + new - first), np.bool_)
    tree = np.tri(item.tree_rows, dtype=np.bool_) if item.is_chain else ancestor_mask(item.parents)
    visible[:, item.trunk - first :] = tree[item.kept_tree :]
    if horizon is not None:
        positions = key_positions(item)
        visible &= positions[first:] >= horizon[positions[item.base_length :]][:, None]
    return visible


def packed_attention(
    call: AttentionCall,
    query: torch.Tensor,  # [n, kv_heads, groups · rows, key_width]: heads that share keys are rows of one head
    keys: torch.Tensor,  # [n, kv_heads, keys, key_width]
    values: torch.Tensor,  # [n, kv_heads, keys, value_width]
    mask: torch.Tensor | None,  # additive, as broadcast to [n, kv_heads, groups · rows, keys]
) -> torch.Tensor:  # [n, kv_heads, groups · rows, value_width]
    """Attention as a call asks for it, over other keys than its own."""
    softcap, sinks = call.extras.get(SOFTCAP), call.extras.get(SINKS)
    if softcap is None and sinks is None:
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=call.scaling)
    scaling = 1 / math.sqrt(query.shape[3]) if call.scaling is None else call.scaling
    scores = (query @ keys.transpose(2, 3)).float() * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat((scores, _sink_scores(sinks, scores)), dim=3)
    weights = scores.softmax(dim=3)[..., : keys.shape[2]]
    return weights.to(values.dtype) @ values


def position_bias(
    slopes: torch.Tensor,  # [heads]
    positions: torch.Tensor,  # [keys]
    kv_heads: int,
    rows: int,
) -> torch.Tensor:  # [1, kv_heads, groups · rows, keys], added to scores
    """ALiBi (arXiv 2108.12409): a softmax doesn't change with a row's own position, so a key's is all that counts."""
    bias = (slopes[:, None] * positions).view(kv_heads, -1, 1, len(positions))
    return bias.expand(-1, -1, rows, -1).reshape(1, kv_heads, -1, len(positions))


def _sink_scores(sinks: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Each query head's sink [heads] beside the rows of that head: [n, kv_heads, groups · rows, 1]."""
    count, kv_heads, rows, _ = scores.shape
    by_head = sinks.float().view(kv_heads, -1, 1)
    return by_head.expand(-1, -1, rows // by_head.shape[1]).reshape(1, kv_heads, rows, 1).expand(count, -1, -1, -1)
