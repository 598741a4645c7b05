"""A decoder's weights as transformers loads them: dtype, device, layers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from paceline.engine.checks import refuse_config
from paceline.engine.cpu.linear import cpu_has_bfloat16
from paceline.engine.cpu.row_products import has_wide_vectors
from paceline.engine.memory import available_ram, refuse_unpacked_beyond, refuse_weights_beyond
from paceline.models.config_limits import refuse_ignored, refuse_ignored_rotation, refuse_numbers
from paceline.models.gguf import gguf_sources
from paceline.models.gguf_config import model_config
from paceline.models.gguf_header import read_header
from paceline.models.model_files import CONFIG_FILE, config_of, read_model_json_if_any, refuse_elsewhere
from paceline.models.packed import unpack_tensors, unpacked_bytes
from paceline.models.quantized import unpacking, without_quantization
from paceline.models.resolve import ModelSource
from paceline.models.surplus import held_weights, stored_tensors
from paceline.models.text_part import read_config
from paceline.models.whole import load_whole, quiet_loading, refuse_larger, refusing_files
from paceline.protocol.errors import InvalidInput, Unsupported
from paceline.runtime.config import FAST_DTYPE, EngineSettings

LOADABLE = "a decoder that transformers loads"


def set_threads(threads: int) -> None:
    """Set the calling thread's compute threads; 0 takes every core that torch sees."""
    if threads > 0:
        torch.set_num_threads(threads)


def layers_of(model: PreTrainedModel) -> torch.nn.ModuleList:
    """A decoder's layers, the first first.

    Raises:
        Unsupported: they can't be told.
    """
    config: Any = model.config.get_text_config()
    stack = getattr(*_layer_stack(model, config.num_hidden_layers))
    assert isinstance(stack, torch.nn.ModuleList)
    return stack


def _layer_stack(model: PreTrainedModel, count: int) -> tuple[torch.nn.Module, str]:
    """The module that holds the list of layers, and its name there."""
    stacks = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, torch.nn.ModuleList) and len(child) == count
    ]
    if len(stacks) != 1:
        kind = model.config.get_text_config().model_type
        raise Unsupported(f"model type {kind}: {len(stacks)} stacks of {count} layers, expected 1")
    return stacks[0]


def keep_layers(model: PreTrainedModel, layers: tuple[int, ...]) -> None:
    """Drop every decoder layer but `layers`, and renumber those.

    Raises:
        InvalidInput: a layer that the model doesn't have.
        Unsupported: the model's layers can't be told.
    """
    config: Any = model.config.get_text_config()
    count: int = config.num_hidden_layers
    if not layers or min(layers) < 0 or max(layers) >= count:
        raise InvalidInput.of("layers", layers, f"in [0, {count - 1}]")
    parent, name = _layer_stack(model, count)
    stack = getattr(parent, name)
    kept_layers = torch.nn.ModuleList([stack[layer] for layer in layers])
    for index, layer in enumerate(kept_layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, "layer_idx", index)  # noqa: B010  # nn.Module's own annotation forbids the plain form
    setattr(parent, name, kept_layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in layers]
    config.num_hidden_layers = len(layers)


def load_decoder(
    source: ModelSource, settings: EngineSettings, *, on_host: bool = False, as_stored: bool = False
) -> PreTrainedModel:
    """Load a decoder as transformers makes it, with every layer unless its name lists some.

    `on_host`: leave the weights in host memory, though the dtype is the device's. `as_stored`: there, leave those of
    safetensors that need no unpacking in their dtype; they are then pages of the files, read where they are used.

    Raises:
        InvalidInput: nothing that transformers loads, or not whole.
        Unsupported: not a decoder that can be packed.
    """
    device = select_device(settings.device)
    config, arguments = _read_config(source, settings)  # refuses what it can before weights are read
    if device.type == "cpu":
        refuse_weights_beyond(str(source.gguf or source.location), available_ram())
    dtype: Any = select_dtype(settings.dtype, device)
    with quiet_loading(), refusing_files(source, source.name, LOADABLE):
        if source.kind == "folder" and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
            _refuse_larger(source, config)
        where = _where_weights_are(source, config, dtype)
        is_plain = source.gguf is None and where.keys() == {"pretrained_model_name_or_path"}
        model: Any = load_whole(
            source.name,
            source,
            **arguments | where,
            dtype="auto" if as_stored and is_plain else dtype,
            attn_implementation="eager",
            trust_remote_code=settings.trust_remote_code,
        )
        refuse_ignored_rotation(config_of(source), model)
    if source.layers is not None:
        keep_layers(model, source.layers)
    return model if on_host else model.to(device)  # type: ignore[no-any-return]


def _where_weights_are(source: ModelSource, config: PreTrainedConfig, dtype: torch.dtype | str) -> dict[str, Any]:
    """The arguments of `from_pretrained` for the weights: a place, or unpacked tensors."""
    if source.gguf is not None:
        return gguf_sources(source.gguf)
    method = unpacking(source.name, config.to_dict())
    if method.packing is None:
        return {"pretrained_model_name_or_path": source.location, **method.arguments}
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        limit = "one whose code is transformers' own: packed weights are unpacked for no other"
        raise InvalidInput.of("model", source.name, limit)
    torch_dtype = dtype if isinstance(dtype, torch.dtype) else None
    size = unpacked_bytes(source, method.packing, (torch_dtype or torch.float32).itemsize)
    refuse_unpacked_beyond(source.name, size, available_ram())
    tensors = unpack_tensors(source, method.packing, torch_dtype)
    return {"pretrained_model_name_or_path": None, "config": without_quantization(config), "state_dict": tensors}


@contextmanager
def computing_in(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[None]:
    """Have a model compute in another dtype than that of its weights, which are converted a layer at a time."""
    layers = [] if model.dtype == dtype else [*layers_of(model)]
    inside = {module for layer in layers for module in layer.modules()}
    others = [each for each in model.modules() if each not in inside and [*each.parameters(recurse=False)]]
    stored_weights: dict[torch.nn.Parameter, torch.Tensor] = {}

    def convert(module: torch.nn.Module, _: object) -> None:
        for weight in module.parameters():
            stored_weights[weight], weight.data = weight.data, weight.data.to(dtype)

    def restore(module: torch.nn.Module, *_: object) -> None:
        for weight in module.parameters():
            weight.data = stored_weights.pop(weight)

    parts = [*layers, *others] if layers else []
    hooks = [each.register_forward_pre_hook(convert) for each in parts]
    hooks += [each.register_forward_hook(restore) for each in parts]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def load_decoder_config(source: ModelSource, settings: EngineSettings) -> PreTrainedConfig:
    """A decoder's configuration, without its weights.

    Raises:
        InvalidInput: nothing that transformers loads as a decoder, or quantized in a way that isn't unpacked.
        Unsupported: not a decoder that can be packed.
    """
    return _read_config(source, settings)[0]


def _read_config(source: ModelSource, settings: EngineSettings) -> tuple[PreTrainedConfig, dict[str, Any]]:
    with refusing_files(source, source.name, LOADABLE):
        if source.gguf is None:
            config, arguments = _read_folder_config(source, settings)
        else:
            config, arguments = model_config(read_header(source.gguf)), {}
    assert isinstance(config, PreTrainedConfig)
    unpacking(source.name, config.to_dict())
    refuse_config(config)
    brings_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not brings_code:
        raise InvalidInput.of("model", source.name, f"{LOADABLE} (model type {config.model_type} is none)")
    return config, arguments


def _read_folder_config(source: ModelSource, settings: EngineSettings) -> tuple[PreTrainedConfig, dict[str, Any]]:
    refuse_elsewhere(source)
    raw, where = read_model_json_if_any(source, CONFIG_FILE), config_of(source)
    refuse_numbers(where, raw)
    config, arguments = read_config(source, trust_remote_code=settings.trust_remote_code)
    refuse_ignored(where, raw, config)
    return config, arguments


def _refuse_larger(source: ModelSource, config: PreTrainedConfig) -> None:
    """Refuse a folder whose configuration has far more weights than its files, before any is made."""
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    refuse_larger(lambda: kind(copy.deepcopy(config)), held_weights(stored_tensors(source)), "network")


def select_device(name: str) -> torch.device:
    """`auto`: a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise InvalidInput.of("device", name, f"auto or a torch device ({error})") from error


def select_dtype(name: str, device: torch.device) -> torch.dtype | str:
    """`auto`: the checkpoint's own dtype on an accelerator, float32 on a CPU; `fast` trades precision there too."""
    if name == FAST_DTYPE and device.type == "cpu":
        # Weights in panels are rounded as they are laid out.
        return torch.bfloat16 if cpu_has_bfloat16() and not has_wide_vectors() else torch.float32
    if name in ("auto", FAST_DTYPE):
        return "auto" if device.type == "cuda" else torch.float32
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
