"""Attention to the keys that an index chooses: sparse attention of DeepSeek-V3.2 (arXiv 2512.02556) and its kind.

Beside keys and values, an indexer keeps a small index key of each row. It scores a row's visible keys by theirs, and
the row attends to the `index_topk` best alone. Indexers are transformers' own modules. One is called for all rows of
a step, to have their index keys, and once more for each row that sees more keys than it may choose: with the index
keys of exactly those, in the order of their positions. So a verified row chooses as a decoded one does, equal scores
included, whatever its step holds beside it (docs/decisions/2026-11-26-states-at-the-base.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from transformers import PreTrainedModel

from paceline.engine.forward import NO_MASK, PLACE, current_attender

INDICES = "indices"
"""Key of a call's extras: the keys that an index chose, as `Chooser.choose` returns them."""


class _IndexCache:
    """What an indexer takes for its cache: notes its rows' index keys, and gives it those that rows choose from."""

    def __init__(self, keys: torch.Tensor | None = None) -> None:
        """Offer index keys [keys, width]; None: the first new one."""
        self._keys = keys
        self.new = torch.empty(0)

    def update_indexer(self, new: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """As transformers' caches; new index keys are [1, rows, width]."""
        self.new = new
        return new[:, :1] if self._keys is None else self._keys[None]


@dataclass(frozen=True, eq=False)
class IndexCall:
    """One indexer's call in a packed pass."""

    indexer: Any
    forward: Callable[..., torch.Tensor]
    """The module's own, whatever has taken its place."""
    rows: tuple[torch.Tensor, ...]
    """What it reads of each row, its rotations last: each [1, rows, …]."""

    @property
    def layer(self) -> int:
        """Number of the layer, among those that attend."""
        layer: int = getattr(self.indexer, PLACE)
        return layer

    @property
    def limit(self) -> int:
        """Keys that a row may choose."""
        limit: int = self.indexer.index_topk
        return limit

    def keys(self) -> torch.Tensor:
        """The index keys of all rows [rows, width]."""
        cache = _IndexCache()
        self._call(self.rows, cache)
        return cache.new[0]

    def masks(self, sessions: Iterable[tuple[slice, torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        """What the rows of each session choose, whose index keys are kept from now on.

        Args:
            sessions: where the rows are in the pass; index keys [keys, width], whose last ones are theirs and are
                written; which of them each row sees [rows, keys].

        Returns:
            An additive mask [rows, keys] of each session.
        """
        new, masks = self.keys(), []
        for rows, keys, visible in sessions:
            keys[len(keys) - len(visible) :] = new[rows]
            masks.append(self.mask(rows.start, keys, visible))
        return tuple(masks)

    def mask(self, low: int, keys: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """What a session's rows choose, the first of which is row `low` of the pass.

        Args:
            low: that row.
            keys: the session's index keys [keys, width].
            visible: which of them each row sees [rows, keys].

        Returns:
            An additive mask [rows, keys].
        """
        choice = visible.clone()
        for row in (visible.sum(dim=1) > self.limit).nonzero()[:, 0].tolist():
            places = visible[row].nonzero()[:, 0]
            choice[row] = False
            choice[row, places[self.best(low + row, keys[places])]] = True
        return torch.zeros(choice.shape, dtype=keys.dtype, device=keys.device).masked_fill_(~choice, float("-inf"))

    def best(self, row: int, keys: torch.Tensor) -> torch.Tensor:
        """Which of the keys that a row sees it attends to, by index keys [keys, width]: [limit] places of them."""
        return self._call([each[:, row : row + 1] for each in self.rows], _IndexCache(keys))[0, 0]

    def _call(self, rows: Sequence[torch.Tensor], cache: _IndexCache) -> torch.Tensor:
        *inputs, cos, sin = rows
        sees_all = torch.ones((1, 1, 1), dtype=torch.bool, device=cos.device)
        return self.forward(*inputs, (cos, sin), sees_all, None, cache=cache)


@runtime_checkable
class Chooser(Protocol):
    """An attender whose rows see the keys that an index chooses."""

    def choose(self, call: IndexCall) -> Any:
        """What the layer hands to attention as its extra `INDICES`, and layers that share its choice."""


def index_width(module: Any) -> int:
    """Width of an attention module's index keys; 0: it has none of its own."""
    indexer = getattr(module, "indexer", None)
    width: int = 0 if indexer is None else indexer.head_dim
    return width


def open_indexers(model: PreTrainedModel) -> None:
    """Have a model's indexers ask the attender in packed passes. Harmless when repeated."""
    modules: list[Any] = [each for each in model.modules() if hasattr(each, "indexer")]
    for module in modules if any(index_width(each) for each in modules) else ():
        module.forward = partial(_attend_unmasked, type(module).forward.__get__(module))
        indexer = module.indexer
        if indexer is not None:
            indexer.forward = partial(_choose, type(indexer).forward.__get__(indexer), indexer)


def _attend_unmasked(own: Callable[..., Any], *arguments: Any, **others: Any) -> Any:
    """Such modules take a part of the mask, which a packed pass hasn't."""
    if others.get("attention_mask") is None:
        others["attention_mask"] = NO_MASK
    return own(*arguments, **others)


def _choose(
    own: Callable[..., Any],
    indexer: nn.Module,
    hidden: torch.Tensor,
    query_latent: torch.Tensor,
    rotations: tuple[torch.Tensor, torch.Tensor],
    mask: Any,
    *arguments: Any,
    **others: Any,
) -> Any:
    if mask is not NO_MASK:
        return own(hidden, query_latent, rotations, mask, *arguments, **others)
    attender = current_attender()
    if not isinstance(attender, Chooser):  # it asks for shapes alone, or trains a draft, which may err
        return ()
    return attender.choose(IndexCall(indexer, own, (hidden, query_latent, *rotations)))


@contextmanager
def choosing_few(model: PreTrainedModel, limit: int) -> Iterator[None]:
    """Have a model's rows choose fewer keys, so that short texts have more."""
    indexers: list[Any] = [each.indexer for each in model.modules() if index_width(each)]
    limits = [indexer.index_topk for indexer in indexers]
    try:
        for indexer, own in zip(indexers, limits, strict=True):
            indexer.index_topk = min(own, limit)
        yield
    finally:
        for indexer, own in zip(indexers, limits, strict=True):
            indexer.index_topk = own
