"""Models of real shapes with random weights: what a step costs depends on shapes alone."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    },
    "1b": {  # as Llama 3.2 1B
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "tie_word_embeddings": True,
    },
    "8b": {  # as Llama 3 8B
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "tie_word_embeddings": False,
    },
    "32b": {  # as Qwen 2.5 32B
        "hidden_size": 5120,
        "intermediate_size": 27_648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152_064,
        "tie_word_embeddings": False,
    },
}
DEVIATION = 0.02


@torch.inference_mode()
def random_model(
    shape: str, dtype: torch.dtype, device: torch.device, max_length: int, **changes: Any
) -> PreTrainedModel:
    """A decoder of a named shape, but for `changes`, made on the device: its weights pass through no host memory."""
    config = LlamaConfig(**SHAPES[shape] | changes, max_position_embeddings=max_length)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    model = model.to_empty(device=device)
    # Frequencies are computed when the module is made, which was on no device.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    model.tie_weights()
    generator = torch.Generator(device).manual_seed(0)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(std=DEVIATION, generator=generator)
        else:
            weight.fill_(1)
    assert isinstance(model, PreTrainedModel)
    return model


def weights_read(model: PreTrainedModel) -> int:
    """Bytes of weights that a step reads: all but an embedding of its own, of which it reads its rows alone."""
    total = sum(weight.nbytes for weight in model.parameters())
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert isinstance(embedding, torch.Tensor)
    return total if head is embedding else total - embedding.nbytes
