"""Facts of a model's configuration about its tokenizer's ids: which end a text, and which have logits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from paceline.models.config_limits import refuse_numbers
from paceline.models.model_files import (
    CONFIG_FILE,
    GENERATION_FILE,
    config_of,
    model_file,
    read_model_json_if_any,
)
from paceline.models.resolve import ModelSource
from paceline.protocol.errors import require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_END = "eos_token_id"


def read_tokenizer(
    source: ModelSource, *, trust_remote_code: bool
) -> tuple[PreTrainedTokenizerBase, Iterable[int], int | None]:
    """A model's own tokenizer, the ids that end a text beside its own, and how many ids have logits if it says so.

    Raises:
        Exception: whatever the library raises while it reads the files.
    """
    from paceline.models import gguf_config
    from paceline.models.gguf_header import read_header

    if source.gguf is not None:
        from paceline.models.llama_tokenizer import readable_tokenizer

        header = read_header(source.gguf)
        return readable_tokenizer(header), gguf_config.end_ids(header), None
    from transformers import AutoTokenizer  # imports torch, which a GGUF file's tokenizer does without

    inner = AutoTokenizer.from_pretrained(source.location, trust_remote_code=trust_remote_code)
    return inner, end_ids(source), logits_width(source, trust_remote_code=trust_remote_code)


def end_ids(source: ModelSource) -> frozenset[int]:
    """End ids that a model's settings add to the tokenizer's own.

    The generation settings come first, as in transformers and vLLM, then the model's, then those of its text model.

    Raises:
        DamagedFile: a file is no JSON.
        InvalidInput: they are no ids.
    """
    config = read_model_json_if_any(source, CONFIG_FILE)
    generation = read_model_json_if_any(source, GENERATION_FILE)
    for file, part in (
        (GENERATION_FILE, generation),
        (CONFIG_FILE, config),
        (CONFIG_FILE, config.get("text_config")),
    ):
        value = part.get(_END) if isinstance(part, Mapping) else None
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            whole = all(isinstance(each, int) and not isinstance(each, bool) for each in ids)
            require(whole, f"model {source.name}: {file}: {_END}", value, "a token id, or a list of them")
            return frozenset(ids)
    return frozenset()


def logits_width(source: ModelSource, *, trust_remote_code: bool) -> int | None:
    """The number of ids that a model has logits for; None: its tokenizer comes without a configuration."""
    from paceline.models.text_part import read_config

    if model_file(source, CONFIG_FILE) is None:
        return None
    refuse_numbers(config_of(source), read_model_json_if_any(source, CONFIG_FILE))
    try:
        config, _ = read_config(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):
        return None  # a model that transformers doesn't know may have a tokenizer that it knows
    width: int | None = getattr(config.get_text_config(), "vocab_size", None)
    return width
