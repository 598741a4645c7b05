"""Folders as they are published: a text model held by one of text and images, and model types of others' layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PreTrainedConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from paceline.drafters.formats.target_weights import TargetWeights
from paceline.engine.loading import load_engine
from paceline.models.text_part import HOLDERS
from paceline.protocol.errors import InvalidInput
from tests.engine import tiny
from tests.engine.families import _SHAPE, named
from tests.engine.test_families import SETTINGS, generated, greedy
from tests.models.saving import save_with_tokenizer

_SMALL = {
    "hidden_size": 16, "embed_dim": 16, "intermediate_size": 16, "num_hidden_layers": 1, "depth": 1, "head_dim": 8,
    "num_attention_heads": 2, "num_heads": 2, "image_size": 28, "patch_size": 14, "out_hidden_size": 32,
}  # fmt: skip
"""Of whatever tower stands beside the text model."""
_HOLDING: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
_IMAGE = 95
"""The token that stands for an image; no text here has it."""


def holder_of(name: str, text: PreTrainedConfig) -> PreTrainedConfig:
    kind: Any = CONFIG_MAPPING[name]
    towers: dict[str, Any] = {}
    for part in kind().sub_configs.keys() - {"text_config"}:
        whole = getattr(kind(), part).to_dict()
        towers[part] = whole | {key: value for key, value in _SMALL.items() if key in whole}
    config: PreTrainedConfig = kind(text_config=text.to_dict(), **towers)
    for each in ("image_token_id", "image_token_index", "video_token_id", "video_token_index"):
        if getattr(config, each, None) is not None:
            setattr(config, each, _IMAGE)
    return config


def text_config(name: str) -> PreTrainedConfig:
    kind: Any = type(CONFIG_MAPPING[name]().get_text_config())
    config: PreTrainedConfig = kind(**_SHAPE)
    return config


_YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.1,
}  # fmt: skip
"""As published folders of Ministral 3 have it, the context short."""
HELD = {
    "mistral": transformers.MistralConfig(**_SHAPE, sliding_window=None),
    "ministral3": transformers.Ministral3Config(**_SHAPE, rope_parameters=_YARN),
}
"""Text models of one holder; the second's embedding is its head, too."""


@pytest.mark.parametrize(
    ("name", "held"),
    [("mistral3", "mistral"), ("mistral3", "ministral3"), ("smolvlm", "")]
    + [pytest.param(name, "", marks=pytest.mark.full) for name in sorted(HOLDERS - {"mistral3", "smolvlm"})],
)
def test_the_text_of_a_model_with_images_is_its_own(tmp_path: Path, name: str, held: str) -> None:
    config = holder_of(name, HELD.get(held) or text_config(name))
    if held:
        config.tie_word_embeddings = held == "ministral3"
    torch.manual_seed(0)
    model = _HOLDING[type(config)](config).float()
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3)
    model.tie_weights()
    save_with_tokenizer(model, tmp_path)
    assert greedy(load_engine(str(tmp_path), SETTINGS)) == generated(model.eval())
    target = TargetWeights.load(str(tmp_path), SETTINGS)
    torch.testing.assert_close(target.head(), model.get_output_embeddings().weight.detach())
    torch.testing.assert_close(target.embedding(), model.get_input_embeddings().weight.detach())


def test_a_head_of_its_own_is_read_where_the_holder_says_tied(tmp_path: Path) -> None:
    """Published folders of this type have a head, and leave the library's default, which is tied."""
    config = holder_of("mistral3", transformers.MistralConfig(**_SHAPE, sliding_window=None))
    config.tie_word_embeddings = False
    model = _HOLDING[type(config)](config).float()
    save_with_tokenizer(model, tmp_path, tie_word_embeddings=None)
    assert greedy(load_engine(str(tmp_path), SETTINGS)) == generated(model.eval())


@pytest.mark.parametrize("model_type", ["kimi_k2", *tiny.in_full("mimo")])
def test_a_model_type_of_other_layers_needs_no_code_of_its_own(tmp_path: Path, model_type: str) -> None:
    layers = {"kimi_k2": "DeepSeek-V3, R1, Kimi K2", "mimo": "Qwen 2, 2.5"}
    model = tiny.random_model(named(layers[model_type]).config())
    own = {"AutoConfig": "configuration.Config", "AutoModelForCausalLM": "modeling.Model"}
    save_with_tokenizer(model, tmp_path, model_type=model_type, auto_map=own)
    text = generated(model.eval())
    for trusted in (False, True):
        engine = load_engine(str(tmp_path), SETTINGS.model_copy(update={"trust_remote_code": trusted}))
        assert greedy(engine) == text


def test_a_holder_that_is_not_known_is_refused_by_its_type(tmp_path: Path) -> None:
    config = holder_of("qwen2_5_vl", text_config("qwen2_5_vl"))
    config.save_pretrained(tmp_path)
    with pytest.raises(InvalidInput, match="model type qwen2_5_vl is none"):
        load_engine(str(tmp_path), SETTINGS)
