"""Tiny random decoders, and the plain whole-prefix forward pass that engines are held to."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from paceline.engine.cuda.static_engine import StaticEngine
from paceline.engine.decoder import build_engine
from paceline.engine.interface import Engine, Logits, StepItem, StepPlan
from paceline.engine.transformer import TransformerEngine
from paceline.models.tokenizer import TableTokenizer
from paceline.runtime.config import EngineSettings

DEVICE = torch.device(os.environ.get("PACELINE_TEST_DEVICE", "cpu"))
"""Of the engines that tests make: `cuda` holds those of a GPU to the plain pass, which stays on the CPU."""
VOCAB = 97
PADDED_WIDTH = 128
CONTEXT = 256
ROW_BYTES = 3 * 2 * 2 * 8 * 4
"""Of a row of `llama()`: layers, keys and values, heads of them, their width, float32."""
THREAD = EngineSettings(threads=1)
TOLERANCE = 2e-4
"""Of logits that are several units large; a wrong row moves them by 0.1 and more."""
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
    return transformers.LlamaConfig(**{**_SHAPE, "vocab_size": VOCAB, "num_key_value_heads": 2, **changes})


def qwen2(**changes: Any) -> PreTrainedConfig:
    return transformers.Qwen2Config(**{**_SHAPE, "vocab_size": VOCAB, "num_key_value_heads": 1, **changes})


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
    return transformers.Qwen3Config(
        **{**_SHAPE, "vocab_size": PADDED_WIDTH, "num_key_value_heads": 4, "head_dim": 16, **changes}
    )


def gpt_neox(**changes: Any) -> PreTrainedConfig:
    return transformers.GPTNeoXConfig(**{**_SHAPE, "vocab_size": VOCAB, **changes})


def gemma2(**changes: Any) -> PreTrainedConfig:
    return transformers.Gemma2Config(**{**_SHAPE, "vocab_size": VOCAB, "pad_token_id": 0, **changes})


FAMILIES: dict[str, Callable[..., PreTrainedConfig]] = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3, padded vocabulary": qwen3_padded,
    "gpt_neox": gpt_neox,
}


def random_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        own = copy.deepcopy(config)  # which says what attention a model has
        model = AutoModelForCausalLM.from_config(own, dtype=torch.float32, attn_implementation="eager")
    assert isinstance(model, PreTrainedModel)
    return model


class Plain:
    """The model's own eager forward pass over a whole history; `width`: ids that have logits."""

    def __init__(self, model: PreTrainedModel, width: int = VOCAB) -> None:
        self._model = copy.deepcopy(model)
        self._model.train(False)
        self._width = width

    @torch.inference_mode()
    def logits(self, history: Sequence[int]) -> Logits:
        """Logits [V] of the token after `history`."""
        output = self._model(input_ids=torch.tensor([list(history)]), use_cache=False).logits
        row: Logits = output[0, -1, : self._width].float().numpy()
        return row

    def assert_row(self, row: Logits, history: Sequence[int]) -> None:
        assert row.shape == (self._width,)
        assert row.dtype == np.float32
        np.testing.assert_allclose(row, self.logits(history), atol=TOLERANCE, rtol=0)


def in_full(*values: Any) -> list[Any]:
    """Parameters of `make test-full` alone."""
    return [pytest.param(value, marks=pytest.mark.full) for value in values]


def build(model: PreTrainedModel, settings: EngineSettings = THREAD, *, static: bool = False, **more: Any) -> Engine:
    """An engine of a model, whose layers it may replace."""
    # A share of a GPU's memory that leaves room for the engines of other workers.
    on_gpu = {"gpu_memory_utilization": 0.05, "kernels": os.environ.get("PACELINE_TEST_KERNELS", "auto")}
    changed = EngineSettings.model_validate({**dict(settings), **on_gpu, **more})
    on_device: Any = model.to(DEVICE)  # type: ignore[arg-type]  # what transformers annotates is not its own
    return build_engine(on_device, TableTokenizer(VOCAB, None), changed, "tiny", static=static)


def transformer(model: PreTrainedModel, settings: EngineSettings = THREAD, **more: Any) -> TransformerEngine:
    engine = build(model, settings, **more)
    assert isinstance(engine, TransformerEngine)
    return engine


def static(model: PreTrainedModel, settings: EngineSettings = THREAD, **more: Any) -> StaticEngine:
    engine = build(model, settings, static=True, **more)
    assert isinstance(engine, StaticEngine)
    return engine


def engine_and_plain(config: PreTrainedConfig, **settings: Any) -> tuple[TransformerEngine, Plain]:
    model = random_model(config)
    plain = Plain(model)
    return transformer(model, **settings), plain


def chain(session: int, base: int, tokens: Sequence[int]) -> StepItem:
    """Rows one behind the other, the logits of all asked for."""
    return StepItem(session, base, tuple(tokens), logit_rows=tuple(range(len(tokens))))


def step(engine: Engine, item: StepItem) -> Logits:
    """The logits of a step of one item."""
    (logits,) = engine.step(StepPlan((item,)))
    return logits


def read(engine: Engine, tokens: Sequence[int]) -> Logits:
    """Logits [tokens, V] of a text that a session of its own reads in one step."""
    engine.open(1, len(tokens))
    logits = step(engine, chain(1, 0, tokens)).copy()
    engine.close(1)
    return logits
