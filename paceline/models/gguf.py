"""GGUF files as models of transformers, and as plain float32 checkpoints.

A GGUF file's tensors under the names and in the layout that transformers' models have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.models.gguf_config import ROPE_TENSORS, architecture_of, model_config
from paceline.models.gguf_header import GgufHeader, read_header
from paceline.models.gguf_tokenizer import file_tokenizer
from paceline.models.pullable import ProgressCallback, PullProgress
from paceline.models.whole import load_whole, quiet_loading, refuse_incomplete
from paceline.protocol.errors import InternalError, InvalidInput

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

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


_CHECK_PROMPT = "The quick brown fox jumps over the lazy dog. 0123456789\n\tdef f(x): return x"


def library_versions() -> dict[str, str]:
    """Versions of the libraries that decide a model's numbers."""
    import torch
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}


def gguf_sources(file: Path) -> dict[str, Any]:
    """The arguments of `load_whole` for a GGUF file: its configuration and tensors, in the place of a folder.

    Raises:
        InvalidInput: the file is damaged, or says what can't be honoured; names it.
    """
    header = read_header(file)
    config = model_config(header)
    return {"pretrained_model_name_or_path": None, "config": config, "state_dict": model_tensors(header, config)}


def convert_gguf(gguf: Path, folder: Path, report: ProgressCallback | None = None) -> None:
    """Write a GGUF model as a plain float32 safetensors folder with tokenizer and chat template.

    Raises:
        InvalidInput: as `gguf_sources`.
        InternalError: the folder, loaded again, doesn't give the logits that the model gave before it was saved.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    report = report or (lambda _: None)
    with quiet_loading():
        report(PullProgress("load", 0.65))
        tokenizer = file_tokenizer(read_header(gguf))
        ids = tokenizer.encode(_CHECK_PROMPT)
        model = load_whole(gguf.name, **gguf_sources(gguf), dtype="float32")
        logits = _logits(model, ids)
        report(PullProgress("convert", 0.85))
        model.save_pretrained(folder)
        del model  # a model of some size has no room beside itself
        tokenizer.save_pretrained(folder)
        report(PullProgress("check", 0.9))
        new_tokenizer = AutoTokenizer.from_pretrained(folder)
        if new_tokenizer.encode(_CHECK_PROMPT) != ids or new_tokenizer.get_vocab() != tokenizer.get_vocab():
            raise InternalError("the saved tokenizer differs from the GGUF's")
        again = _logits(AutoModelForCausalLM.from_pretrained(folder, dtype="float32"), ids)
        if not bool((again == logits).all()):
            worst = float((again - logits).abs().max())
            raise InternalError(f"the saved model's logits differ from those before it was saved by up to {worst:g}")


def _logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    import torch

    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([ids])).logits
    return logits
