"""A GGUF file's tensors under the names and in the layout that transformers' models have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from paceline.models.gguf_config import architecture_of
from paceline.models.gguf_header import GgufHeader
from paceline.models.gguf_rope import ROPE_TENSORS
from paceline.models.whole import refuse_incomplete
from paceline.protocol.errors import InvalidInput

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_BARE = (".experts.gate_up_proj", ".experts.down_proj")
"""Endings of parameters' names that are no module's `weight`."""


def model_tensors(header: GgufHeader, config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """Every tensor of the file in float32, by the name that it has in the model.

    Raises:
        InvalidInput: a tensor that has no place, or of a type that isn't unpacked; tensors missing or misshapen.
    """
    import torch

    sources = _sources(header)
    shapes = _expected_shapes(config)
    for name, parts in sources.items():
        if name not in shapes:
            raise InvalidInput.of("tensor", parts[0], f"one for which a {header.architecture} model has a place")
    biases = {name for name in shapes.keys() - sources.keys() if name.endswith(".bias")}
    tied_names = {"lm_head.weight"} if config.tie_word_embeddings else set()
    file_shapes = {name: _stored_shape(header, parts, shapes[name]) for name, parts in sources.items()}
    misshapen = {name: (shape, shapes[name]) for name, shape in file_shapes.items() if shape != shapes[name]}
    refuse_incomplete("model", header.file.name, shapes.keys() - sources.keys() - biases - tied_names, misshapen)
    absent = {name: torch.zeros(shapes[name]) for name in biases}  # llama.cpp adds those that are there
    return absent | {
        name: torch.from_numpy(_values(header, parts, config).reshape(shapes[name]))
        for name, parts in sources.items()
    }


def _sources(header: GgufHeader) -> dict[str, list[str]]:
    """The file's tensors that make up each parameter."""
    modules = architecture_of(header).modules
    sources: dict[str, list[str]] = {}
    for name in header.tensors:
        if name in ROPE_TENSORS:  # part of the configuration
            continue
        block = _BLOCK.fullmatch(name)
        target = _OUTSIDE.get(name)
        if block is not None and block[2] in modules:
            module = f"model.layers.{int(block[1])}.{modules[block[2]]}"
            target = module if module.endswith(_BARE) and block[3] == "weight" else f"{module}.{block[3]}"
        if target is None:
            raise InvalidInput.of("tensor", name, f"one for which a {header.architecture} model has a place")
        sources.setdefault(target, []).append(name)
    return {name: sorted(parts) for name, parts in sources.items()}


def _expected_shapes(config: PreTrainedConfig) -> Mapping[str, tuple[int, ...]]:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _stored_shape(header: GgufHeader, parts: list[str], parameter_shape: tuple[int, ...]) -> tuple[int, ...]:
    shape, *others = [header.tensors[part].shape for part in parts]
    if others and {len(each) for each in (shape, *others)} == {3} and all(each[::2] == shape[::2] for each in others):
        return (shape[0], sum(each[1] for each in (shape, *others)), shape[2])
    return parameter_shape if (1, *shape) == parameter_shape else shape  # a vector that is a matrix of one row


def _values(header: GgufHeader, parts: list[str], config: PreTrainedConfig) -> np.ndarray:
    architecture = architecture_of(header)
    try:
        values = [header.tensors[part].values() for part in parts]
    except NotImplementedError as error:
        raise InvalidInput.of(f"type of tensor {parts[0]}", str(error), "one that gguf unpacks") from error
    (weight,) = values if len(values) == 1 else (np.concatenate(values, 1),)
    if architecture.paired_rows and ".attn_q." in parts[0]:
        weight = _halves(weight, config.num_attention_heads)
    if architecture.paired_rows and ".attn_k." in parts[0]:
        weight = _halves(weight, config.num_key_value_heads)
    if parts[0].endswith("norm.weight"):
        weight = weight - architecture.norm_offset
    return np.require(weight, np.float32, ("C", "W", "A"))


def _halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from neighbouring pairs, as llama.cpp turns them, to pairs half a head apart."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
