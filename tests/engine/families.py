"""Families of targets, each as a tiny random checkpoint; docs/models.md shows the same list."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import transformers
from transformers import PreTrainedConfig

from tests.engine import tiny

WINDOW = 8
"""Positions of a tiny model's window or chunk."""
CHOSEN = 6
"""Keys that a row of a tiny model attends to, if it chooses them."""
CONTEXT = 64
_SHAPE: dict[str, Any] = {
    "vocab_size": tiny.VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_HYBRID = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_SHARING = {
    "sliding_window": WINDOW, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2, "vocab_size_per_layer_input": tiny.VOCAB, "hidden_size_per_layer_input": 8,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ROUTED = {**_EXPERTS, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_STATE_SPACE = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 16,
}  # fmt: skip
_FIRST_STATE_SPACE = {"state_size": 4, "tie_word_embeddings": False}
_SHORT = {"layer_types": ["conv", "full_attention"]}
_SHARED_EXPERTS = {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}
_SMALL_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
_INDEX: dict[str, Any] = {
    "index_topk": CHOSEN,
    "index_n_heads": 16,  # so that a key hardly ever has no score in all of them
    "index_head_dim": 16,
    "pad_token_id": None,  # whose embedding is 0, and so every score of such a row
}
_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip

WINDOWS, SOFTCAP, SINKS = "windows", "soft-cap", "sinks"
CHUNKS, LATENT, UNEVEN = "chunks", "latent attention", "layers of different shapes"
ALIBI, INDEX = "ALiBi", "an index of keys"
DELTA, STATE_SPACE, SHORT = "gated delta rule", "state space", "short convolutions"
LIGHTNING = "lightning attention"
STATES = (DELTA, STATE_SPACE, SHORT, LIGHTNING)
"""What keeps a state."""


@dataclass(frozen=True)
class Family:
    """What a table says of it, and a configuration; `refused` is what loading says, empty if it is served."""

    name: str
    config_class: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    asks: tuple[str, ...] = ()
    """Of attention, beside all earlier positions."""
    refused: str = ""
    why: str = ""
    core: bool = False
    """Tested in every run: one of each kind."""
    held_by: str = ""
    """The configuration of a model of text and images that it is the text model of."""

    def config(self) -> PreTrainedConfig:
        kind: type[PreTrainedConfig] = getattr(transformers, self.config_class)
        own = {name: value for name, value in {**_SHAPE, **self.changes}.items() if value is not None}
        text = kind(**own)
        text.pad_token_id = own.get("pad_token_id")
        if not self.held_by:
            return text
        holder: Callable[..., PreTrainedConfig] = getattr(transformers, self.held_by)
        return holder(text_config=text.to_dict(), vision_config=_VISION)


_TWICE = "transformers' attentions differ in it"

FAMILIES = (
    Family("Llama 2, 3", "LlamaConfig"),
    Family("Llama 4", "Llama4TextConfig", {
        "attention_chunk_size": WINDOW, "num_local_experts": 2, "intermediate_size_mlp": 48, "num_hidden_layers": 4,
    }, (CHUNKS,), core=True),
    Family("Mistral 7B v0.1", "MistralConfig", {"sliding_window": WINDOW}, (WINDOWS,), core=True),
    Family("Mistral Small, Nemo", "MistralConfig", {"sliding_window": None}),
    Family("Ministral", "MinistralConfig", _HYBRID, (WINDOWS,)),
    Family("Ministral 3", "Ministral3Config"),
    Family("Mixtral", "MixtralConfig", {"num_local_experts": 4, "sliding_window": None}),
    Family("Gemma", "GemmaConfig"),
    Family("Gemma 2", "Gemma2Config", {
        **_HYBRID, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 20.0,
    }, (WINDOWS, SOFTCAP), core=True),
    Family("Gemma 3", "Gemma3TextConfig", {**_HYBRID, "query_pre_attn_scalar": 8}, (WINDOWS,)),
    Family("Gemma 3 with images, text alone", "Gemma3TextConfig", {
        **_HYBRID, "query_pre_attn_scalar": 8,
    }, (WINDOWS,), held_by="Gemma3Config"),
    Family("Gemma 3n", "Gemma3nTextConfig", {
        **_SHARING, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4, "intermediate_size": [48] * 4,
    }, (WINDOWS,)),
    Family("Gemma 4", "Gemma4TextConfig", {**_SHARING, "global_head_dim": 16}, (WINDOWS, UNEVEN), core=True),
    Family("VaultGemma", "VaultGemmaConfig", _HYBRID, (WINDOWS, SOFTCAP)),
    Family("Qwen 2, 2.5", "Qwen2Config"),
    Family("Qwen 2 with windows", "Qwen2Config", {
        "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1,
    }, (WINDOWS,), core=True),
    Family("Qwen 3", "Qwen3Config"),
    Family("Qwen 3 MoE", "Qwen3MoeConfig", {**_EXPERTS, "num_experts": 4}),
    Family("gpt-oss", "GptOssConfig", {
        **_HYBRID, **_EXPERTS, "num_local_experts": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }, (WINDOWS, SINKS), core=True),
    Family("DeepSeek-V2", "DeepseekV2Config", {**_LATENT, **_ROUTED}, (LATENT,)),
    Family("DeepSeek-V3, R1, Kimi K2", "DeepseekV3Config", {**_LATENT, **_ROUTED}, (LATENT,), core=True),
    Family("GLM-4", "Glm4Config"),
    Family("GLM-4.5", "Glm4MoeConfig", _ROUTED),
    Family("GLM-4.7 Flash", "Glm4MoeLiteConfig", {**_LATENT, **_ROUTED}, (LATENT,)),
    Family("MiMo-V2-Flash", "MiMoV2FlashConfig", {
        **_HYBRID, **_EXPERTS, "n_routed_experts": 4, "v_head_dim": 12, "mlp_layer_types": ["dense", "sparse"],
    }, (WINDOWS, SINKS, UNEVEN), core=True),
    Family("MiniCPM 3", "MiniCPM3Config", _LATENT, (LATENT,)),
    Family("MiniMax-M2", "MiniMaxM2Config", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Family("Hunyuan A13B", "HunYuanMoEV1Config", {"num_experts": 4, "moe_topk": 2}, core=True),
    Family("LongCat-Flash", "LongcatFlashConfig", {
        **_LATENT, "num_hidden_layers": None, "num_layers": 2, "moe_topk": 2, "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16, "n_routed_experts": 4, "zero_expert_num": 2,
    }, (LATENT,)),
    Family("Phi", "PhiConfig"),
    Family("Phi 3", "Phi3Config", {"sliding_window": WINDOW}, (WINDOWS,)),
    Family("OLMo 2", "Olmo2Config"),
    Family("OLMo 3", "Olmo3Config", _HYBRID, (WINDOWS,)),
    Family("Command R", "CohereConfig"),
    Family("Command R7B, A", "Cohere2Config", _HYBRID, (WINDOWS,)),
    Family("Granite", "GraniteConfig"),
    Family("Granite MoE", "GraniteMoeConfig", {"num_local_experts": 4}),
    Family("EXAONE 4", "Exaone4Config", _HYBRID, (WINDOWS,)),
    Family("SmolLM 3", "SmolLM3Config"),
    Family("Seed-OSS", "SeedOssConfig"),
    Family("Nemotron", "NemotronConfig"),
    Family("ERNIE 4.5", "Ernie4_5Config"),
    Family("Apertus", "ApertusConfig"),
    Family("StarCoder 2", "Starcoder2Config", {"sliding_window": WINDOW}, (WINDOWS,)),
    Family("StableLM", "StableLmConfig"),
    Family("GPT-2", "GPT2Config", _SMALL_GPT),
    Family("GPT-NeoX, Pythia", "GPTNeoXConfig"),
    Family("OPT", "OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    Family("Bloom", "BloomConfig", {"n_layer": 2, "n_head": 4}, (ALIBI,), core=True),
    Family("MPT", "MptConfig", {"d_model": 32, "n_heads": 4, "n_layers": 2}, (ALIBI,)),
    Family("Falcon", "FalconConfig", {"head_dim": None}),
    Family("Falcon 40B, 180B", "FalconConfig", {
        "head_dim": None, "new_decoder_architecture": True, "num_kv_heads": 2,
    }),
    Family("Falcon RW", "FalconConfig", {"head_dim": None, "alibi": True}, (ALIBI,), "alibi = true", _TWICE),
    Family("GPT-J", "GPTJConfig", {**_SMALL_GPT, "rotary_dim": 4}),
    Family("CodeGen", "CodeGenConfig", {**_SMALL_GPT, "rotary_dim": 4}),
    Family("Qwen 3 Next", "Qwen3NextConfig", {**_DELTA, **_SHARED_EXPERTS}, (DELTA,)),
    Family("Qwen 3.5", "Qwen3_5TextConfig", _DELTA, (DELTA,)),
    Family("Qwen 3.5 MoE", "Qwen3_5MoeTextConfig", {**_DELTA, **_SHARED_EXPERTS}, (DELTA,)),
    Family("OLMo Hybrid", "OlmoHybridConfig", _DELTA, (DELTA,)),
    Family("Kimi Linear", "KimiLinearConfig", {
        **_LATENT, **_EXPERTS, "layer_types": _DELTA["layer_types"], "linear_num_heads": 4, "linear_head_dim": 8,
        "num_local_experts": 4, "q_lora_rank": None,
    }, (DELTA, LATENT)),
    Family("MiniMax M1", "MiniMaxConfig", {
        "layer_types": _DELTA["layer_types"], "num_local_experts": 4, "block_size": 16, "sliding_window": None,
        "initializer_range": 0.25,
    }, (LIGHTNING,)),
    Family("Nemotron-H", "NemotronHConfig", {
        **_EXPERTS, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 16,
        "layers_block_type": ["mamba", "attention", "mlp", "moe"], "num_hidden_layers": 4, "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 16, "initializer_range": 0.25,
    }, (STATE_SPACE,)),
    Family("Granite 4 hybrid", "GraniteMoeHybridConfig", {
        **_STATE_SPACE, "layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
    }, (STATE_SPACE,)),
    Family("Falcon-H1", "FalconH1Config", {**_STATE_SPACE, "mamba_d_ssm": 64}, (STATE_SPACE,)),
    Family("Bamba", "BambaConfig", {**_STATE_SPACE, "attn_layer_indices": [1]}, (STATE_SPACE,)),
    Family("Zamba 2", "Zamba2Config", {
        "mamba_d_state": 8, "n_mamba_heads": 4, "mamba_headdim": 16, "mamba_ngroups": 2, "chunk_size": 16,
        "num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"], "use_mem_rope": True,
        "time_step_min": 1e-9,  # which generate leaves out
    }, (STATE_SPACE,)),
    Family("Zamba", "ZambaConfig", {
        "mamba_d_state": 4, "mamba_dt_rank": 4, "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "hybrid"],
    }, (STATE_SPACE,)),
    Family("Jamba", "JambaConfig", {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "num_experts": 4,
        "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False,
    }, (STATE_SPACE,)),
    Family("Mamba 2", "Mamba2Config", {
        "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 16,
        "tie_word_embeddings": False,
    }, (STATE_SPACE,)),
    Family("Mamba", "MambaConfig", _FIRST_STATE_SPACE, (STATE_SPACE,)),
    Family("Falcon Mamba", "FalconMambaConfig", _FIRST_STATE_SPACE, (STATE_SPACE,)),
    Family("Lara Mini", "LaraMiniConfig", {}, (STATE_SPACE,)),
    Family("LFM 2", "Lfm2Config", _SHORT, (SHORT,)),
    Family("LFM 2 MoE", "Lfm2MoeConfig", {
        **_SHORT, **_EXPERTS, "num_experts": 4, "num_dense_layers": 1, "initializer_range": 0.35,
    }, (SHORT,)),
    Family("LFM 3", "Lfm3Config", {**_SHORT, "initializer_range": 0.28}, (SHORT,)),
    Family("DeepSeek-V3.2", "DeepseekV32Config", {**_LATENT, **_ROUTED, **_INDEX}, (LATENT, INDEX), core=True),
    Family("GLM-5", "GlmMoeDsaConfig", {
        **_LATENT, **_ROUTED, **_INDEX, "indexer_types": ["full", "shared"],
    }, (LATENT, INDEX)),
    Family("A.X K2", "AXK2Config", {
        **_LATENT, **_EXPERTS, **_INDEX, "n_routed_experts": 4, "gated_norm_rank": 4,
    }, (LATENT, INDEX)),
    Family("Hunyuan 4", "HYV4Config", {
        **_LATENT, **_EXPERTS, **_INDEX, "n_routed_experts": 4, "num_hidden_layers": 3, "hc_mult": 2,
        "indexer_types": ["full", "full", "shared"], "mlp_layer_types": ["dense", "sparse", "sparse"],
    }, (LATENT, SINKS, INDEX)),
    Family("DiffLlama", "DiffLlamaConfig", {}, ("two attentions a layer",), "attends twice", "one a layer is built"),
    Family("Doge", "DogeConfig", {}, ("a mask of its own",), "mask of its own", "it masks keys by what they hold"),
)  # fmt: skip

STATEFUL = tuple(family for family in FAMILIES if {*family.asks} & {*STATES} and not family.refused)
CHOOSING = tuple(family for family in FAMILIES if INDEX in family.asks and not family.refused)
SERVED = tuple(family for family in FAMILIES if not family.refused)
REFUSED = tuple(family for family in FAMILIES if family.refused)


def named(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


def table() -> str:
    rows = ["| family | beside attention to all earlier positions | served |", "|---|---|---|"]
    for family in FAMILIES:
        served = f"refused: {family.why}" if family.refused else "yes"
        rows.append(f"| {family.name} | {', '.join(family.asks) or '–'} | {served} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(table(), end="")  # noqa: T201
