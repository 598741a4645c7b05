"""Experts in tiles of one shape: how many rows choose an expert is the company's doing, and products depend on it.

transformers runs an expert on all the rows that chose it. Here it runs on eight at a time, padding included, so a
row's bits are its own and its expert's; what its experts yield is added up in the order in which it chose them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

import torch
from transformers import PreTrainedModel

from paceline.engine.reproducible.shapes import TILE_ROWS

_ROUTED = ("hidden_states", "top_k_index", "top_k_weights")
"""What the library's modules of experts take: rows [rows, width], and for each its experts and their weights."""
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def tile_experts(model: PreTrainedModel) -> None:
    """Have every module of experts run in tiles; those of other forms stay, and the isolation check judges them."""
    experts = [each for each in model.modules() if _parameters(each) == _ROUTED]
    if not experts:
        return
    model.set_experts_implementation("eager")  # expert by expert, each on the rows that chose it
    for each in experts:
        each.forward = partial(_in_tiles, each.forward)  # the module stays: routers read its settings


def _parameters(module: torch.nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(module.forward).parameters)


def _in_tiles(run: Experts, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """As the module's own forward pass; `chosen` and `weights` are [rows, experts a row], the rest [rows, width]."""
    width, experts_a_row = rows.shape[-1], chosen.shape[-1]
    pairs = chosen.reshape(-1)  # row after row, each by its choices
    yielded = rows.new_zeros((len(pairs), width))
    certain = weights.new_ones((TILE_ROWS, 1))
    for expert in pairs.unique():
        for some in (pairs == expert).nonzero()[:, 0].split(TILE_ROWS):
            tile = rows.new_zeros((TILE_ROWS, width))
            tile[: len(some)] = rows[some // experts_a_row]
            yielded[some] = run(tile, expert.expand(TILE_ROWS, 1), certain)[: len(some)]
    weighted = yielded * weights.reshape(-1, 1)
    return weighted.view(-1, experts_a_row, width).sum(dim=1).to(rows.dtype)
