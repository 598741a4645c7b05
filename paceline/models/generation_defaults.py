"""Defaults of requests from a model's `generation_config.json`, as `vllm serve` reads it."""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.models.model_files import GENERATION_FILE, model_file
from paceline.models.resolve import resolve
from paceline.models.table_names import is_table
from paceline.protocol.errors import InvalidInput, require
from paceline.protocol.given_files import read_json
from paceline.protocol.sampling import FIELDS_WITH_DEFAULTS, SamplingParams

logger = logging.getLogger(__name__)

AUTO = "auto"
MAX_UINT32 = (1 << 32) - 1
WHOLE: Mapping[str, tuple[int, int | None]] = {"top_k": (0, -1), "max_new_tokens": (1, None)}
"""Fields that are whole numbers: the least, and what stands for all of them in vLLM."""
FIELDS = (*FIELDS_WITH_DEFAULTS, "max_new_tokens")
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "bad_words_ids": (),
    "begin_suppress_tokens": (),
    "diversity_penalty": (0,),
    "do_sample": (True,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "forced_bos_token_id": (),
    "forced_decoder_ids": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "length_penalty": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "remove_invalid_values": (False,),
    "renormalize_logits": (False,),
    "sequence_bias": (),
    "suppress_tokens": (),
    "top_h": (1,),
    "typical_p": (1,),
    "watermarking_config": (),
}
"""Fields by which transformers' `generate` would change the text and nothing here does, as vLLM doesn't either, with
the values by which it wouldn't; `null` and what is empty are neutral everywhere."""


@dataclass(frozen=True)
class GenerationDefaults:
    """Values for the fields that requests leave open. `sampling`: its unset fields have no default of the model."""

    sampling: SamplingParams = SamplingParams()
    max_new_tokens: int | None = None


NO_DEFAULTS = GenerationDefaults()


def load_defaults(model: str, source: str = AUTO) -> GenerationDefaults:
    """The defaults of anything that names a model; those that come from its file are logged.

    Args:
        model: as `load_tokenizer` takes it.
        source: `auto`: its generation config, where it has one; anything else: nothing is read.

    Raises:
        InvalidInput: the file is no JSON object, or a value is none; it names file and field.
    """
    file = None if source != AUTO or is_table(model) else _file_of(model)
    if file is None:
        return NO_DEFAULTS
    values = read_json("generation_config", file)
    defaults = _defaults(file, values)
    listing = ", ".join(f"{name}={values[name]}" for name in FIELDS if _is_set(values, name))
    if listing:
        hint = "--generation-config none leaves them out"
        logger.info("defaults of requests are the model's: %s (file=%s; %s)", listing, file, hint)
    if others := sorted(_without_effect(values)):
        logger.info("not applied, as in vLLM: %s (file=%s)", ", ".join(others), file)
    return defaults


def _file_of(model: str) -> Path | None:
    try:
        return model_file(resolve(model), GENERATION_FILE)
    except OSError:
        return None


def _defaults(file: Path, values: Mapping[str, Any]) -> GenerationDefaults:
    set_here = [name for name in FIELDS if _is_set(values, name)]
    numbers: dict[str, Any] = {name: _number(f"{name} in {file}", name, values[name]) for name in set_here}
    most = numbers.pop("max_new_tokens", None)
    return GenerationDefaults(SamplingParams(**numbers), most)


def _number(field: str, name: str, value: object) -> float:
    """A number as the wire has it, so that every service sees the same bits."""
    require(isinstance(value, int | float) and not isinstance(value, bool), field, value, "a number")
    assert isinstance(value, int | float)
    if name in WHOLE:
        least, keep_all = WHOLE[name]
        require(value % 1 == 0, field, value, "a whole number")
        require(least <= value <= MAX_UINT32 or value == keep_all, field, value, f"in [{least}, {MAX_UINT32}]")
        return max(int(value), 0)
    number = _float32(value)
    try:
        SamplingParams(**{name: number})  # type: ignore[arg-type]  # none of the whole ones
    except InvalidInput as error:
        raise InvalidInput.of(field, value, error.metadata["limit"]) from error
    return number


def _float32(value: float) -> float:
    try:
        number: float = struct.unpack("f", struct.pack("f", float(value)))[0]
    except OverflowError:
        return math.inf
    return number


def _without_effect(values: Mapping[str, Any]) -> Iterator[str]:
    return (name for name, neutral in _NEUTRAL.items() if _is_set(values, name) and values[name] not in neutral)


def _is_set(values: Mapping[str, Any], name: str) -> bool:
    return values.get(name) not in (None, [], {})
