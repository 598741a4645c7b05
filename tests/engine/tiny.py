"""Tiny random decoders, and the plain whole-prefix forward pass that engines are held to."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from paceline.engine.decoder import build_engine
from paceline.engine.interface import Engine
from paceline.models.tokenizer import TableTokenizer
from paceline.runtime.config import EngineSettings

VOCAB = 97
PADDED_WIDTH = 128
CONTEXT = 256
_SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    # Far from zero, so that attention to a wrong row moves logits by much more than rounding.
    "initializer_range": 0.3,
}


def llama(**changes: Any) -> PreTrainedConfig:
    return LlamaConfig(**{**_SHAPE, "vocab_size": VOCAB, "num_key_value_heads": 2, **changes})


def qwen2(**changes: Any) -> PreTrainedConfig:
    return Qwen2Config(**{**_SHAPE, "vocab_size": VOCAB, "num_key_value_heads": 1, **changes})


def qwen_coder(**changes: Any) -> PreTrainedConfig:
    """The shape of Qwen2.5-Coder-1.5B: twelve heads over two key heads, a tied head, slow rotations."""
    shape = {"hidden_size": 192, "num_attention_heads": 12, "num_key_value_heads": 2, "initializer_range": 0.2}
    return qwen2(**shape, tie_word_embeddings=True, rope_parameters=_SLOW_ROTATION, **changes)


_SLOW_ROTATION = {"rope_type": "default", "rope_theta": 1e6}


def biased(model: PreTrainedModel) -> PreTrainedModel:
    """Give every bias numbers of its own: new models have zeros there."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def qwen3_padded(**changes: Any) -> PreTrainedConfig:
    return Qwen3Config(**{**_SHAPE, "vocab_size": PADDED_WIDTH, "num_key_value_heads": 4, "head_dim": 16, **changes})


def gpt_neox(**changes: Any) -> PreTrainedConfig:
    return GPTNeoXConfig(**{**_SHAPE, "vocab_size": VOCAB, **changes})


def gemma2(**changes: Any) -> PreTrainedConfig:
    return Gemma2Config(**{**_SHAPE, "vocab_size": VOCAB, "pad_token_id": 0, **changes})


FAMILIES: dict[str, Callable[..., PreTrainedConfig]] = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3, padded vocabulary": qwen3_padded,
    "gpt_neox": gpt_neox,
}


def random_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    assert isinstance(model, PreTrainedModel)
    return model


class Plain:
    """The model's own eager forward pass over a whole history."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = copy.deepcopy(model)
        self._model.train(False)

    @torch.inference_mode()
    def logits(self, history: Sequence[int]) -> torch.Tensor:
        """Logits [V] of the token after `history`."""
        output = self._model(input_ids=torch.tensor([list(history)]), use_cache=False).logits
        row: torch.Tensor = output[0, -1, :VOCAB]
        return row


def engine_and_plain(config: PreTrainedConfig, **settings: Any) -> tuple[Engine, Plain]:
    model = random_model(config)
    plain = Plain(model)
    wanted = EngineSettings(threads=1, **settings)
    return build_engine(model, TableTokenizer(VOCAB, None), wanted, "tiny"), plain
