"""Experts in tiles of one shape, since products depend on how many rows of a step choose an expert.

transformers runs an expert on all the rows that chose it. Here it runs on eight at a time, padding included, so a
row's bits depend on the row and its expert alone; its experts' outputs are added up in the order in which it
chose them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

import torch
from transformers import PreTrainedModel

from paceline.engine.reproducible.shapes import TILE_ROWS

_PARAMETERS_OF_EXPERTS = ("hidden_states", "top_k_index", "top_k_weights")
"""The parameters of the library's modules of experts: rows [rows, width], their experts, and the experts' weights."""
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def tile_experts(model: PreTrainedModel) -> None:
    """Have every module of experts run in tiles; others stay, and the isolation check tests them."""
    experts = [each for each in model.modules() if _parameters(each) == _PARAMETERS_OF_EXPERTS]
    if not experts:
        return
    model.set_experts_implementation("eager")  # expert by expert, each on the rows that chose it
    for each in experts:
        each.forward = partial(_in_tiles, each.forward)  # the module stays: routers read its settings


def _parameters(module: torch.nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(module.forward).parameters)


def _in_tiles(run: Experts, rows: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """As the module's forward pass; `expert_ids` and `weights` are [rows, experts a row], others [rows, width]."""
    width, experts_a_row = rows.shape[-1], expert_ids.shape[-1]
    pairs = expert_ids.reshape(-1)  # row after row, each by its choices
    outputs = rows.new_zeros((len(pairs), width))
    certain = weights.new_ones((TILE_ROWS, 1))
    for expert in pairs.unique():
        for some in (pairs == expert).nonzero()[:, 0].split(TILE_ROWS):
            tile = rows.new_zeros((TILE_ROWS, width))
            tile[: len(some)] = rows[some // experts_a_row]
            outputs[some] = run(tile, expert.expand(TILE_ROWS, 1), certain)[: len(some)]
    weighted_outputs = outputs * weights.reshape(-1, 1)
    return weighted_outputs.view(-1, experts_a_row, width).sum(dim=1).to(rows.dtype)
