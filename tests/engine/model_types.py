"""Every causal model type of the installed transformers, built tiny: which are served, and why others are refused.

`python -m tests.engine.model_types` prints the list that docs/models.md has.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from paceline.models.whole import refusing_network
from paceline.protocol.errors import InvalidInput, Unsupported
from tests.engine import tiny
from tests.engine.families import FAMILIES

CONTEXT = 64
TEXT = (5, 17, 3, 88, 41, 9, 60, 23, 71, 12, 5, 17)
_SIZES: dict[str, Any] = {
    **{"vocab_size": tiny.VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": CONTEXT},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3, "sliding_window": 8},
    **{"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT, "d_model": 32, "n_layers": 2, "n_heads": 4},
    **{"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "ffn_dim": 48},
    **{"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48},
    **{"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4},
    **{"num_experts_per_tok": 2, "num_local_experts": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
}
_LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 12}
_LATENT |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
NOT_BUILT = (
    *("blt", "cohere_compass_text", "dots1", "dots3_note", "dots3_note_text", "gemma3n", "gemma4"),
    *("gemma4_assistant", "gemma4_unified", "gemma4_unified_assistant", "git", "got_ocr2"),
    *("moss_transcribe_diarize", "musicgen", "musicgen_melody", "phi4_multimodal", "qwen4_exp", "qwen4_exp_text"),
    *("reformer", "xlm", "xlnet", "xmod"),
)
"""Types whose tiny form takes more than sizes: towers, layers of sizes of their own, languages."""
_MORE: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "zaya": {"num_experts_per_tok": 1},
}
_REASONS = (
    ("attention interface", "attention is code of its own in transformers"),
    ("not causal", "rows see later rows"),
    ("packed logits differ", "positions, or something else, follow from a row's place in a step"),
    ("keeps a state|layers are attention or keep", "a state, or layers, of a kind of their own"),
    ("twice|without a layer_idx", "two attentions a layer, or one for several layers"),
    ("mask of its own", "a mask that depends on what keys hold"),
    ("attention with", "a term of attention that isn't built"),
    ("model = ", "the network fails in a packed pass"),
    ("layers of type", "layers that attend to compressed keys"),
)


def _sizes(default: PreTrainedConfig) -> dict[str, Any]:
    """Sizes that a configuration has, and a layer of each of its first two kinds."""
    sizes = {**_SIZES, **_LATENT} if hasattr(default, "kv_lora_rank") else _SIZES
    names = inspect.signature(type(default)).parameters
    own = {name: size for name, size in sizes.items() if name in names}
    kinds = getattr(default, "layer_types", None)
    if kinds and "layer_types" in names:
        own["layer_types"] = [kinds[0], next((kind for kind in kinds if kind != kinds[0]), kinds[0])]
    return {**own, **_MORE.get(default.model_type, {})}


def tiny_config(kind: Any) -> PreTrainedConfig:
    """A family's own configuration, if it is one's; else the default with sizes of ours."""
    for family in FAMILIES:
        if type(family.config()) is kind:
            return family.config()
    default = kind()
    text = default.get_text_config()
    own = _sizes(default) if text is default else {"text_config": type(text)(**_sizes(text)).to_dict()}
    config: PreTrainedConfig = kind(**own)
    return config


def refusal(kind: Any) -> str:
    """Why a type is refused; empty: it is served, with the logits of its own forward pass.

    Raises:
        AssertionError: it is served with other logits.
    """
    model = tiny.random_model(tiny_config(kind))
    plain = tiny.Plain(model)
    try:
        with refusing_network(kind.model_type):
            engine = tiny.build(model, max_model_len=CONTEXT, kv_bytes=1 << 25)
    except (Unsupported, InvalidInput) as error:
        return error.message
    for length in (len(TEXT) - 1, len(TEXT)):
        plain.assert_row(tiny.read(engine, TEXT[:length])[-1], TEXT[:length])
    return ""


def kinds() -> dict[str, Any]:
    every = {kind.model_type: kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING}
    return {name: kind for name, kind in sorted(every.items()) if name not in NOT_BUILT}


def listing(refusals: Mapping[str, str]) -> str:
    by_reason: dict[str, list[str]] = {}
    for name, message in refusals.items():
        reason = next(words for pattern, words in _REASONS if re.search(pattern, message)) if message else "served"
        by_reason.setdefault(reason, []).append(f"`{name}`")
    order = ("served", *(words for _, words in _REASONS))
    lines = ["| | model types |", "|---|---|"]
    for reason in order:
        if reason in by_reason:
            names = by_reason[reason]
            head = f"served, {len(names)}" if reason == "served" else f"refused: {reason}"
            lines.append(f"| {head} | {', '.join(names)} |")
    lines.append(f"| not tried | {', '.join(f'`{name}`' for name in NOT_BUILT)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(listing({name: refusal(kind) for name, kind in kinds().items()}), end="")  # noqa: T201
