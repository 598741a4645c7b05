"""Small real tokenizers, and model folders that hold one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from paceline.models.tokenizer import TransformersTokenizer

TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}:{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def byte_level_tokenizer(extra: int = 0) -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges, two special tokens, and `extra` tokens more."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {letter: i + 2 for i, letter in enumerate(alphabet)}
    vocabulary |= {f"<extra {i}>": len(vocabulary) + i for i in range(extra)}
    inner = Tokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE)


def templated(template: Any, kind: type[TransformersTokenizer] = TransformersTokenizer) -> TransformersTokenizer:
    """Byte-level BPE with a chat template of its own, or several by name."""
    inner = byte_level_tokenizer()
    inner.chat_template = template
    return kind(inner)


def letter_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """One token a code point, `size` ids in all."""
    vocabulary = {"</s>": 0} | {chr(0x60 + i): i for i in range(1, size)}
    inner = Tokenizer(models.BPE(vocabulary, []))
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")


def save_with_tokenizer(model: PreTrainedModel, folder: Path, **changes: Any) -> None:
    """Save a model of the tiny families with a tokenizer of 97 ids, its `config.json` changed; None drops a key."""
    model.save_pretrained(folder)
    letter_tokenizer(97).save_pretrained(folder)
    if changes:
        values = change_json(folder / "config.json", **changes)
        stated = {key: value for key, value in values.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(stated))


def change_json(file: Path, **changes: Any) -> dict[str, Any]:
    """Write a file again with other values of some keys; returns all of them."""
    values: dict[str, Any] = json.loads(file.read_text()) | changes
    file.write_text(json.dumps(values))
    return values
