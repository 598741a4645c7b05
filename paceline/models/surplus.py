"""Tensors of a model's files that its network has no place for: refused by name, but for those known to say nothing.

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
    """What a file's header says of a tensor. `dtype`: as safetensors calls it."""

    dtype: str
    shape: tuple[int, ...]


def stored_tensors(source: ModelSource) -> Mapping[str, StoredTensor]:
    """Every tensor of the files that transformers reads, without its values.

    Raises:
        SafetensorError: a file is damaged.
        DamagedFile: the index is.
    """
    from safetensors import safe_open

    stored: dict[str, StoredTensor] = {}
    for file in weight_files(source, "model.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # no mapping
                part = opened.get_slice(name)
                stored[name] = StoredTensor(part.get_dtype(), tuple(part.get_shape()))
    return stored or _pickled(weight_files(source, "pytorch_model.bin"))


def held_weights(stored: Mapping[str, StoredTensor]) -> int:
    """How many weights the tensors are, at most: whole numbers may pack 16 of two bits in four bytes."""
    packed = {dtype: 4 * int(dtype[1:]) // 8 for dtype in _INTEGERS if dtype != "BOOL"}
    return sum(math.prod(tensor.shape) * packed.get(tensor.dtype, 1) for tensor in stored.values())


def weight_files(source: ModelSource, name: str) -> list[Path]:
    """The files of a model's tensors that transformers reads, none where `name` and its index are missing."""
    file, index = model_file(source, name), model_file(source, f"{name}.index.json")
    if file is not None or index is None:
        return [] if file is None else [file]
    shards = {
        shard: model_file(source, shard) for shard in sorted(set(read_model_json(index)["weight_map"].values()))
    }
    for shard, found in shards.items():
        require(found is not None, f"file {str(index)!r}: weight_map", shard, "the name of a file that is there")
    return [found for found in shards.values() if found is not None]


def _pickled(files: Iterable[Path]) -> Mapping[str, StoredTensor]:
    import torch

    names = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    stored: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in torch.load(file, map_location="meta", weights_only=True).items():
            stored[name] = StoredTensor(names.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
    return stored


def refuse_surplus(
    loaded: PreTrainedModel, unexpected: Collection[str], source: ModelSource, *, quantized: bool
) -> None:
    """Refuse files that hold more than the network, or numbers that stand for others.

    Args:
        loaded: the network.
        unexpected: names of all tensors that it has no place for.
        resolved: where the files are.
        quantized: whether the library has unpacked their numbers, as the configuration says.

    Raises:
        InvalidInput: with the first few names, and how many there are.
        Unsupported: numbers of few bits without a word on what they stand for.
    """
    stored = stored_tensors(source)
    surplus = sorted(name for name in unexpected if not _is_harmless(name, loaded, unexpected, stored))
    surplus = [name for name in surplus if not (name.endswith(_HEAD) and _is_embedding(name, loaded, source))]
    if surplus:
        limit = f"without tensors that the network of its config.json has no place for: {counted(surplus)}"
        raise InvalidInput.of("model", source.name, limit)
    if not quantized:
        _refuse_dtypes(source.name, loaded, unexpected, stored)


def _is_harmless(
    name: str, loaded: PreTrainedModel, unexpected: Collection[str], stored: Mapping[str, StoredTensor]
) -> bool:
    if any(pattern.search(name) for pattern in _HARMLESS):
        return True
    if _CAUSAL_MASK.search(name):
        shapes = [each.shape for stem, each in stored.items() if _same(stem, name)]
        return bool(shapes) and all(len(shape) == 4 and shape[-1] == shape[-2] for shape in shapes)
    if _TOWERS.match(name):
        # Or the files keep the text's tensors apart from others.
        return loaded.config.get_text_config() is not loaded.config or any(map(_TEXT_PART.search, stored))
    return _is_extra_layer(name, loaded, unexpected)


def _same(stored: str, name: str) -> bool:
    """Whether a stored name and the library's are one tensor's: it adds or drops the base model's prefix."""
    return stored == name or stored.endswith(f".{name}") or name.endswith(f".{stored}")


def _is_extra_layer(name: str, loaded: PreTrainedModel, unexpected: Collection[str]) -> bool:
    """A layer of multi-token prediction behind the network's own, or keys that a layer takes from another one."""
    text: Any = loaded.config.get_text_config()
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return False
    number, rest = int(layer[2]), layer[3]
    if number < text.num_hidden_layers:
        shared = getattr(text, "num_kv_shared_layers", None) or 0
        return number >= text.num_hidden_layers - shared and _SHARED_KEYS.match(rest) is not None
    prefix = f"{layer[1]}layers.{number}."
    return any(_MTP_PARTS.match(other.removeprefix(prefix)) for other in unexpected if other.startswith(prefix))


def _is_embedding(name: str, loaded: PreTrainedModel, source: ModelSource) -> bool:
    """Whether a head that the network takes from its embedding is the same in the files."""
    import torch
    from safetensors import safe_open

    if not getattr(loaded.config.get_text_config(), "tie_word_embeddings", False):
        return False
    own: Any = loaded.get_input_embeddings().weight
    for file in weight_files(source, "model.safetensors"):
        with safe_open(file, "pt") as opened:
            for stem in opened.keys():  # noqa: SIM118  # no mapping
                if _same(stem, name):
                    return torch.equal(opened.get_tensor(stem).to(own.dtype), own.cpu())
    return False


def _refuse_dtypes(
    model: str, loaded: PreTrainedModel, unexpected: Collection[str], stored: Mapping[str, StoredTensor]
) -> None:
    own = {name for name, tensor in loaded.state_dict().items() if not tensor.is_floating_point()}
    for name, tensor in sorted(stored.items()):
        if tensor.dtype in _PLAIN or any(_same(name, other) for other in unexpected):
            continue
        if tensor.dtype in _INTEGERS and any(_same(name, other) for other in own):
            continue
        raise Unsupported(
            f"model {model}: tensor {name} of {tensor.dtype}, and its config.json has no quantization_config that "
            "says what its numbers stand for"
        )


def counted(tensors: list[str]) -> str:
    """How many there are, and the names of the first few."""
    more = ["…"] if len(tensors) > _LISTED_TENSORS else []
    return f"{len(tensors)} ({', '.join(tensors[:_LISTED_TENSORS] + more)})"
