"""Configurations of published folders that the library loads as no decoder, though they hold one.

A model of text and images holds a text model. For those listed, its logits are the text model's own where no image is
given (`tests/engine/test_text_parts.py`), so the text model alone is loaded. Other folders have the layers of a model
type that the library knows under a name that it doesn't.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

from paceline.models.resolve import ModelSource

SAME_LAYERS = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
"""Model types that the library doesn't know, whose layers are those of one that it knows."""
HOLDERS = frozenset(
    {
        "aria",
        "deepseek_vl",
        "exaone4_5",
        "idefics2",
        "idefics3",
        "internvl",
        "llava",
        "llava_next",
        "llava_next_video",
        "llava_onevision",
        "mistral3",
        "ovis2",
        "smolvlm",
        "video_llava",
        "vipllava",
    }
)
"""Model types of text and images, or video, around a text model that stays what it is."""
KEY_MAPPING = {
    r"^(?:model\.)?language_model\.lm_head\.": "lm_head.",
    r"^(?:model\.)?language_model\.(?:model\.)?": "model.",
    r"^model\.text_model\.": "model.",
}
"""From a holder's names of tensors, older and newer ones, to its text model's."""


def read_config(source: ModelSource, *, trust_remote_code: bool) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """The configuration of a folder's decoder, and what `from_pretrained` takes for it beside the path.

    Raises:
        Exception: whatever the library raises while it reads a folder.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

    raw: Mapping[str, Any] = PreTrainedConfig.get_config_dict(source.location)[0]
    model_type = SAME_LAYERS.get(str(raw.get("model_type")))
    if model_type is not None:
        plain = {key: value for key, value in raw.items() if key != "auto_map"}  # its own code isn't needed
        config = CONFIG_MAPPING[model_type].from_dict(plain | {"model_type": model_type})
        return config, {"config": config}
    config = AutoConfig.from_pretrained(source.location, trust_remote_code=trust_remote_code)
    if config.model_type not in HOLDERS:
        return config, {}
    text = _text_config(config)
    return text, {"config": text, "key_mapping": KEY_MAPPING}


def _text_config(holder: Any) -> PreTrainedConfig:
    """The text model's configuration, with the holder's settings of its weights."""
    text: PreTrainedConfig = holder.get_text_config()
    for key in ("tie_word_embeddings", "quantization_config", "dtype"):
        value = getattr(holder, key, None)
        if value is not None:
            setattr(text, key, value)
    return text
