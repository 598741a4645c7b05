"""Tensors of a model's files that its network has no place for: refused by name, except harmless ones.

transformers drops them all, some without a word. So it would a bias that the configuration doesn't speak of, or the
scales of weights whose quantisation it has lost, and another model would be served.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.models.model_files import model_file, read_model_json
from paceline.models.resolve import ModelSource
from paceline.protocol.errors import InvalidInput, Unsupported, require

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_HARMLESS = tuple(
    re.compile(pattern)
    for pattern in (
        # Frequencies of rotations: the configuration says them, and has since they were kept in files.
        r"(^|\.)(rotary_emb|rotary_pos_emb|rotary|rope)\.(original_)?inv_freq$",
        # The numbers 0, 1, 2, …
        r"(^|\.)position_ids$",
        # A value that masked scores get, less than any other.
        r"(^|\.)(attn|attention|self_attn|self_attention)\.masked_bias$",
        # Multi-token prediction: it drafts, the network's own logits don't depend on it.
        r"(^|\.)mtp(_\w+)?\.",
        # Heads that draft, likewise.
        r"(^|\.)(medusa|hydra|eagle3?)(_\w+)?\.",
        # Norms that A.X K1's files hold for dense layers, too, which have none.
        r"(^|\.)mlp\.post_mlp_layernorm\.weight$",
    )
)
_CAUSAL_MASK = re.compile(r"(^|\.)(attn|attention|self_attn|self_attention)\.(bias|causal_mask)$")
"""A triangle of zeros and ones in older files; of one dimension it would be a bias."""
_TOWERS = re.compile(
    r"^(model\.|thinker\.)?(vision_\w+|visual\w*|audio_\w+|image_\w+|video_\w+|embed_vision|embed_audio|multi_modal_projector"
    r"|mm_projector|multimodal_projector|high_res_\w+|connector|aligner|vision|audio)(\.|$)"
)
_TEXT_PART = re.compile(r"(^|\.)(language_model|text_model)\.")
_LAYER = re.compile(r"(^|.*\.)layers\.(\d+)\.(.*)")
_MTP_PARTS = re.compile(r"(eh_proj|enorm|hnorm|shared_head|mtp\w*)(\.|$)")
_SHARED_KEYS = re.compile(r"self_attn\.(k_proj|v_proj|k_norm|v_norm)\.")
_HEAD = "lm_head.weight"
_LISTED_TENSORS = 3
"""Names of tensors in a refusal."""
_PLAIN = ("F64", "F32", "F16", "BF16")
_INTEGERS = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a file's header describes it. `dtype`: as safetensors calls it."""

    dtype: str
    shape: tuple[int, ...]


def stored_tensors(source: ModelSource) -> Mapping[str, StoredTensor]:
    """Every tensor of the files that transformers reads, without its values.

    Raises:
        SafetensorError: a file is damaged.
        DamagedFile: the index is.
    """
    from safetensors import safe_open

    tensors: dict[str, StoredTensor] = {}
    for file in weight_files(source, "model.safetensors"):
        with safe_open(file, "pt") as reader:
            for name in reader.keys():  # noqa: SIM118  # no mapping
                part = reader.get_slice(name)
                tensors[name] = StoredTensor(part.get_dtype(), tuple(part.get_shape()))
    return tensors or _pickled_tensors(weight_files(source, "pytorch_model.bin"))


def held_weights(tensors: Mapping[str, StoredTensor]) -> int:
    """The number of weights that the tensors hold, at most: integers may pack 16 of two bits in four bytes."""
    factors = {dtype: 4 * int(dtype[1:]) // 8 for dtype in _INTEGERS if dtype != "BOOL"}
    return sum(math.prod(tensor.shape) * factors.get(tensor.dtype, 1) for tensor in tensors.values())


def weight_files(source: ModelSource, name: str) -> list[Path]:
    """The files of a model's tensors that transformers reads, none where `name` and its index are missing."""
    file, index = model_file(source, name), model_file(source, f"{name}.index.json")
    if file is not None or index is None:
        return [] if file is None else [file]
    shards = {
        shard: model_file(source, shard) for shard in sorted(set(read_model_json(index)["weight_map"].values()))
    }
    for shard, path in shards.items():
        require(path is not None, f"file {str(index)!r}: weight_map", shard, "the name of a file that is there")
    return [path for path in shards.values() if path is not None]


def _pickled_tensors(files: Iterable[Path]) -> Mapping[str, StoredTensor]:
    import torch

    names = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in torch.load(file, map_location="meta", weights_only=True).items():
            tensors[name] = StoredTensor(names.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
    return tensors


def refuse_surplus(
    model: PreTrainedModel, unexpected_keys: Collection[str], source: ModelSource, *, is_unpacked: bool
) -> None:
    """Refuse files that hold more than the network, or packed numbers.

    Args:
        model: the loaded network.
        unexpected_keys: names of all tensors that it has no place for.
        resolved: where the files are.
        is_unpacked: whether the library has unpacked their numbers, as the configuration says.

    Raises:
        InvalidInput: with the first few names, and how many there are.
        Unsupported: numbers of few bits, and the configuration doesn't say what they stand for.
    """
    tensors = stored_tensors(source)
    surplus = sorted(name for name in unexpected_keys if not _is_harmless(name, model, unexpected_keys, tensors))
    surplus = [name for name in surplus if not (name.endswith(_HEAD) and _is_embedding(name, model, source))]
    if surplus:
        limit = f"without tensors that the network of its config.json has no place for: {count_and_names(surplus)}"
        raise InvalidInput.of("model", source.name, limit)
    if not is_unpacked:
        _refuse_dtypes(source.name, model, unexpected_keys, tensors)


def _is_harmless(
    name: str, model: PreTrainedModel, unexpected_keys: Collection[str], tensors: Mapping[str, StoredTensor]
) -> bool:
    if any(pattern.search(name) for pattern in _HARMLESS):
        return True
    if _CAUSAL_MASK.search(name):
        shapes = [each.shape for stem, each in tensors.items() if _same(stem, name)]
        return bool(shapes) and all(len(shape) == 4 and shape[-1] == shape[-2] for shape in shapes)
    if _TOWERS.match(name):
        # Or the files keep the text's tensors apart from others.
        return model.config.get_text_config() is not model.config or any(map(_TEXT_PART.search, tensors))
    return _is_extra_layer(name, model, unexpected_keys)


def _same(file_name: str, name: str) -> bool:
    """Whether a file's name and the library's are those of one tensor: it adds or drops the base model's prefix."""
    return file_name == name or file_name.endswith(f".{name}") or name.endswith(f".{file_name}")


def _is_extra_layer(name: str, model: PreTrainedModel, unexpected_keys: Collection[str]) -> bool:
    """Whether it is a layer of multi-token prediction, or keys that a layer takes from another one."""
    text: Any = model.config.get_text_config()
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return False
    number, rest = int(layer[2]), layer[3]
    if number < text.num_hidden_layers:
        shared_layers = getattr(text, "num_kv_shared_layers", None) or 0
        return number >= text.num_hidden_layers - shared_layers and _SHARED_KEYS.match(rest) is not None
    prefix = f"{layer[1]}layers.{number}."
    return any(_MTP_PARTS.match(other.removeprefix(prefix)) for other in unexpected_keys if other.startswith(prefix))


def _is_embedding(name: str, model: PreTrainedModel, source: ModelSource) -> bool:
    """Whether a head that the network takes from its embedding is the same in the files."""
    import torch
    from safetensors import safe_open

    if not getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        return False
    own: Any = model.get_input_embeddings().weight
    for file in weight_files(source, "model.safetensors"):
        with safe_open(file, "pt") as reader:
            for stem in reader.keys():  # noqa: SIM118  # no mapping
                if _same(stem, name):
                    return torch.equal(reader.get_tensor(stem).to(own.dtype), own.cpu())
    return False


def _refuse_dtypes(
    model: str, network: PreTrainedModel, unexpected_keys: Collection[str], tensors: Mapping[str, StoredTensor]
) -> None:
    own = {name for name, tensor in network.state_dict().items() if not tensor.is_floating_point()}
    for name, tensor in sorted(tensors.items()):
        if tensor.dtype in _PLAIN or any(_same(name, other) for other in unexpected_keys):
            continue
        if tensor.dtype in _INTEGERS and any(_same(name, other) for other in own):
            continue
        raise Unsupported(
            f"model {model}: tensor {name} of {tensor.dtype}, and its config.json has no quantization_config that "
            "says what its numbers stand for"
        )


def count_and_names(tensors: list[str]) -> str:
    """The number of some tensors, and the names of the first few."""
    more = ["…"] if len(tensors) > _LISTED_TENSORS else []
    return f"{len(tensors)} ({', '.join(tensors[:_LISTED_TENSORS] + more)})"
