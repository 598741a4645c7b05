"""The configuration of a GGUF file's model: each key that changes logits is read, or the file is refused by its name.

llama.cpp gives such files their meaning. A file with a key that it ignores is refused, unless the value changes
nothing.

Rotary positions of a GGUF file, as llama.cpp computes them without flags, in transformers' words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.models.gguf_header import MOST_LAYERS, GgufHeader, GgufKeys, is_whole
from paceline.protocol.errors import InvalidInput, require

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MOST_POSITIONS = 1 << 24
FREQUENCIES = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (FREQUENCIES, LONG, SHORT)
_FACTOR, _ROPE_ATTENTION, _KIND = "rope.scaling.factor", "rope.scaling.attn_factor", "rope.scaling.type"


def rope_parameters(
    keys: GgufKeys, header: GgufHeader, head_size: int, context: int, scalings: tuple[str, ...]
) -> dict[str, Any]:
    """The rotary parameters of a file.

    Args:
        keys: of the file.
        header: of the file, with its tensors of factors.
        head_size: of queries and keys.
        context: longest text that the file allows.
        scalings: `rope.scaling.type`s, and tensors, that both sides compute alike for the architecture.

    Raises:
        InvalidInput: naming the key or tensor.
    """
    rotary_size = keys.integer("rope.dimension_count", 2, head_size, head_size)
    is_whole = rotary_size == head_size or "partial" in scalings
    keys.require(is_whole, "rope.dimension_count", rotary_size, f"{head_size}, a whole head")
    base: dict[str, Any] = {"rope_theta": keys.number("rope.freq_base", 1.001, 1e12, 1e4)}
    if rotary_size != head_size:
        base["partial_rotary_factor"] = rotary_size / head_size
    kind = keys.text(_KIND, ("none", "linear", "yarn", "longrope"), "linear")
    older_name = keys.number("rope.scale_linear", 0.0, 1e6, 1.0)
    factor = keys.number(_FACTOR, 0.0, 1e6, older_name) or 1.0
    attention = keys.number(_ROPE_ATTENTION, 0.0, 1e3, 1.0)
    original = keys.integer("rope.scaling.original_context_length", 1, MOST_POSITIONS, context)
    tensors = [name for name in ROPE_TENSORS if name in header.tensors]
    for name in tensors:
        require(name in scalings, "tensor", name, f"absent from a {header.architecture} file")
    if kind == "yarn":
        keys.require(kind in scalings and not tensors, _KIND, kind, "another for this architecture and its tensors")
        keys.require(factor >= 1.0, _FACTOR, factor, "at least 1")
        return base | {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "attention_factor": attention * (1.0 + 0.1 * math.log(factor)),
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        }
    keys.require(kind != "none" or factor == 1.0, _FACTOR, factor, "1 with scaling none")
    has_lists = tensors == [LONG, SHORT]
    fits = (kind == "longrope") == has_lists or (has_lists and header.architecture == "phi3")
    keys.require(fits, _KIND, kind, f"longrope with tensors {LONG} and {SHORT}, another without them")
    require(
        has_lists or tensors in ([], [FREQUENCIES]),
        "tensors",
        ", ".join(tensors),
        f"{FREQUENCIES}, or {LONG} and {SHORT}",
    )
    if not tensors and attention == 1.0 and (factor == 1.0 or "linear" in scalings):
        return base | ({"rope_type": "default"} if factor == 1.0 else {"rope_type": "linear", "factor": factor})
    lists = [_factors(header, name, rotary_size) for name in tensors] or [[1.0] * (rotary_size // 2)]
    # Factors that hold at any length are longrope whose two lists are one.
    return base | {
        "rope_type": "longrope",
        "long_factor": [factor * each for each in lists[0]],
        "short_factor": [factor * each for each in lists[-1]],
        "original_max_position_embeddings": original if has_lists else context,
        "attention_factor": attention,
    }


def _factors(header: GgufHeader, name: str, rotary_size: int) -> list[float]:
    tensor = header.tensors[name]
    require(
        tensor.shape == (rotary_size // 2,), f"shape of tensor {name}", list(tensor.shape), f"[{rotary_size // 2}]"
    )
    factors: list[float] = tensor.values().tolist()
    require(all(0.0 < each < math.inf for each in factors), f"tensor {name}", factors, "numbers above 0")
    return factors


_WIDEST = 1 << 20
_MOST_HEADS = 1 << 12
_MOST_EXPERTS = 1 << 10
_TOKENS = "tokenizer.ggml.tokens"
_END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_LARGE_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the one size whose queries llama.cpp scales by the hidden size; it knows it by them."""

_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_ATTENTION = _NORMS | {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_DENSE = _ATTENTION | {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_FUSED_MODULES = _NORMS | {
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = _ATTENTION | {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_up_proj",
    "ffn_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_SCALINGS = ("linear", "yarn")
_ATTENTION_BIASES: Mapping[str, tuple[str, ...]] = {"attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output")}


@dataclass(frozen=True)
class GgufArchitecture:
    """The conversion of one architecture's files to a model of transformers.

    Attributes:
        model_type: as transformers calls it.
        modules: of a layer, by the name of the tensor in a block.
        biases: settings that give the model biases, with the tensors of which one has a bias then.
        scalings: as `rope_parameters` takes them.
        own_head: whether an output matrix may stand beside the embedding.
        own_head_size: whether heads may be of another size than their share of the hidden size.
        paired_rows: queries and keys turn neighbouring rows; transformers turns rows half a head apart.
        norm_offset: what norm weights are more than transformers'.
    """

    model_type: str
    modules: Mapping[str, str]
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    scalings: tuple[str, ...] = _SCALINGS
    own_head: bool = True
    own_head_size: bool = True
    paired_rows: bool = False
    norm_offset: float = 0.0


ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture(
        "llama",
        _DENSE,
        {**_ATTENTION_BIASES, "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down")},
        (*_SCALINGS, FREQUENCIES, LONG, SHORT),
        paired_rows=True,
    ),
    "qwen2": GgufArchitecture("qwen2", _DENSE, own_head_size=False),
    "qwen2moe": GgufArchitecture("qwen2_moe", _EXPERTS | _SHARED_EXPERT, own_head_size=False),
    "qwen3": GgufArchitecture("qwen3", _DENSE | _HEAD_NORMS, _ATTENTION_BIASES),
    "qwen3moe": GgufArchitecture("qwen3_moe", _EXPERTS | _HEAD_NORMS, _ATTENTION_BIASES),
    "gemma": GgufArchitecture("gemma", _DENSE, _ATTENTION_BIASES, own_head=False, norm_offset=1.0),
    "gemma2": GgufArchitecture("gemma2", _DENSE | _FOUR_NORMS, _ATTENTION_BIASES, own_head=False, norm_offset=1.0),
    "gemma3": GgufArchitecture(
        "gemma3_text", _DENSE | _FOUR_NORMS | _HEAD_NORMS, _ATTENTION_BIASES, ("linear",), norm_offset=1.0
    ),
    "phi3": GgufArchitecture("phi3", _FUSED_MODULES, scalings=("partial", LONG, SHORT), own_head_size=False),
}


def architecture_of(header: GgufHeader) -> GgufArchitecture:
    """The architecture of a file.

    Raises:
        InvalidInput: an architecture that isn't read, no model, or a part of one.
    """
    architecture = ARCHITECTURES.get(header.architecture)
    if architecture is None:
        raise InvalidInput.of("general.architecture", header.architecture, f"one of: {', '.join(ARCHITECTURES)}")
    kind = str(header.metadata.get("general.type", "model"))
    require(kind == "model", "general.type", kind, "model")
    parts = header.metadata.get("split.count", 1)
    require(is_whole(parts) and parts in (0, 1), "split.count", parts, "1: join the files of the model first")
    return architecture


def model_config(header: GgufHeader) -> PreTrainedConfig:
    """The configuration of the model that a file holds.

    Raises:
        InvalidInput: naming the first key that isn't known, or whose value can't be honoured.
    """
    from transformers import AutoConfig

    architecture, keys = architecture_of(header), GgufKeys(header)
    settings = _dimensions(keys, header, architecture) | _token_ids(header)
    if name := header.metadata.get("general.name"):
        settings["_model_name_or_path"] = name  # where folders converted by transformers have it: one fingerprint
    for setting, tensors in architecture.biases.items():
        settings[setting] = any(name.endswith(f".{tensor}.bias") for name in header.tensors for tensor in tensors)
    context = settings["max_position_embeddings"]
    rope = rope_parameters(keys, header, settings["head_dim"], context, architecture.scalings)
    settings["rope_parameters"] = rope
    if header.architecture in _LARGE_GEMMA:
        settings |= _gemma(keys, header.architecture, settings)
    else:
        window = keys.integer("attention.sliding_window", 0, MOST_POSITIONS, 0)
        limit = f"0 or at least {context}, the context's length: llama.cpp has no window for {header.architecture}"
        keys.require(window == 0 or window >= context, "attention.sliding_window", window, limit)
    if "ffn_gate_inp" in architecture.modules:
        settings |= _experts(keys, header.architecture, settings["intermediate_size"])
    if header.architecture == "phi3":  # its class reads it here
        settings["original_max_position_embeddings"] = rope.get("original_max_position_embeddings", context)
    keys.refuse_others()
    config: PreTrainedConfig = AutoConfig.for_model(architecture.model_type, **settings)
    return config


def vocabulary(header: GgufHeader) -> list[str]:
    """Tokens by id, as many as the embedding has rows.

    Raises:
        InvalidInput: there are none.
    """
    tokens = header.metadata.get(_TOKENS)
    texts = tokens if isinstance(tokens, list) else []
    require(len(texts) > 0, _TOKENS, tokens, "a list of strings")
    return texts


def token_id(header: GgufHeader, key: str) -> int | None:
    """The id that `tokenizer.ggml.KEY` names.

    Raises:
        InvalidInput: it is outside the vocabulary.
    """
    value = header.metadata.get(f"tokenizer.ggml.{key}")
    return None if value is None else _require_id(header, key, value)


def spare_id(header: GgufHeader, key: str) -> int | None:
    """As `token_id`, for an id that no text needs: some files write -1, or its bits, for none."""
    value = header.metadata.get(f"tokenizer.ggml.{key}")
    return value if is_whole(value) and 0 <= value < len(vocabulary(header)) else None


def end_ids(header: GgufHeader) -> tuple[int, ...]:
    """Ids that end a text or a turn, the end of the text first.

    Raises:
        InvalidInput: one is outside the vocabulary.
    """
    ids = [token_id(header, key) for key in _END_IDS]
    further = np.atleast_1d(header.metadata.get("tokenizer.ggml.eos_token_ids", [])).tolist()
    ids += [_require_id(header, "eos_token_ids", value) for value in further]
    return tuple(dict.fromkeys(each for each in ids if each is not None))


def _require_id(header: GgufHeader, key: str, value: object) -> int:
    size = len(vocabulary(header))
    if is_whole(value) and 0 <= value < size:
        return value
    raise InvalidInput.of(f"tokenizer.ggml.{key}", value, f"in [0, {size}), the vocabulary")


def _token_ids(header: GgufHeader) -> dict[str, object]:
    ends = end_ids(header)
    ids: dict[str, object] = {"bos_token_id": token_id(header, "bos_token_id")}
    ids["eos_token_id"] = ends[0] if len(ends) == 1 else list(ends) or None
    return ids | {
        "pad_token_id": spare_id(header, "padding_token_id"),
        "unk_token_id": spare_id(header, "unknown_token_id"),
    }


def _dimensions(keys: GgufKeys, header: GgufHeader, architecture: GgufArchitecture) -> dict[str, Any]:
    hidden = keys.integer("embedding_length", 1, _WIDEST)
    heads = keys.integer("attention.head_count", 1, _MOST_HEADS)
    kv_heads = keys.integer("attention.head_count_kv", 1, heads, heads)
    keys.require(heads % kv_heads == 0, "attention.head_count_kv", kv_heads, f"a divisor of {heads}, the heads")
    head_size = keys.integer("attention.key_length", 2, _WIDEST, hidden // heads)
    keys.require(head_size % 2 == 0, "attention.key_length", head_size, "even: values turn in pairs")
    fits = architecture.own_head_size or head_size * heads == hidden
    keys.require(fits, "attention.key_length", head_size, f"{hidden / heads:g}: {heads} heads share {hidden}")
    for key in ("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"):
        keys.only(key, head_size)
    keys.only("vocab_size", len(vocabulary(header)))
    is_tied = "output.weight" not in header.tensors
    require(is_tied or architecture.own_head, "tensor", "output.weight", f"absent from a {header.architecture} file")
    return {
        "vocab_size": len(vocabulary(header)),
        "max_position_embeddings": keys.integer("context_length", 1, MOST_POSITIONS),
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length", 1, _WIDEST),
        "num_hidden_layers": keys.integer("block_count", 1, MOST_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", 0.0, 1.0),
        "tie_word_embeddings": is_tied,
    }


def _experts(keys: GgufKeys, architecture: str, width: int) -> dict[str, Any]:
    count = keys.integer("expert_count", 1, _MOST_EXPERTS)
    active = keys.integer("expert_used_count", 1, count)
    settings = {
        "num_experts": count,
        "num_experts_per_tok": active,
        "moe_intermediate_size": keys.integer("expert_feed_forward_length", 1, _WIDEST, max(1, width // active)),
        "norm_topk_prob": architecture == "qwen3moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    if architecture == "qwen2moe":
        wide = keys.integer("expert_shared_feed_forward_length", 1, _WIDEST, width)
        settings["shared_expert_intermediate_size"] = wide
    return settings


def _gemma(keys: GgufKeys, architecture: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Windows, soft caps, the scale of queries, and the rotary base of layers with a window."""
    layers, rope = settings["num_hidden_layers"], settings["rope_parameters"]
    is_second = architecture == "gemma2"
    share = settings["hidden_size"] // settings["num_attention_heads"]
    window = keys.integer("attention.sliding_window", int(is_second), MOST_POSITIONS, 4096 if is_second else 0)
    windows = keys.windows(layers, 2 if is_second else 6)
    own = {
        "query_pre_attn_scalar": share if layers == _LARGE_GEMMA[architecture] else settings["head_dim"],
        "sliding_window": window or settings["max_position_embeddings"],
        "layer_types": ["sliding_attention" if window and each else "full_attention" for each in windows],
    }
    if is_second:
        keys.only("rope.freq_base_swa", rope["rope_theta"])
        return own | {
            "attn_logit_softcapping": keys.number("attn_logit_softcapping", 1e-6, 1e6, 50.0),
            "final_logit_softcapping": keys.number("final_logit_softcapping", 1e-6, 1e6, 30.0),
        }
    local = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 1.001, 1e12, 1e4)}
    keys.only("attn_logit_softcapping", 0.0)
    return own | {
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0, 1e6, 0.0) or None,
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
    }
