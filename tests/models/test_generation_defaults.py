"""A model's generation config: what it sets for requests, what it can't, and how it is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from paceline.models.generation_defaults import NO_DEFAULTS, GenerationDefaults, load_defaults
from paceline.protocol.errors import InvalidInput
from paceline.protocol.sampling import FIELDS_WITH_DEFAULTS, SamplingParams, UnstatedNumber

NUMBERS = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1}


def folder_with(folder: Path, **values: Any) -> str:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "generation_config.json").write_text(json.dumps(values))
    return str(folder)


def test_what_the_file_states_becomes_a_default_and_nothing_else_does(tmp_path: Path) -> None:
    defaults = load_defaults(folder_with(tmp_path, **NUMBERS, do_sample=True, eos_token_id=2))
    assert defaults.sampling.stated_numbers == NUMBERS
    assert isinstance(defaults.sampling.min_p, UnstatedNumber)
    assert defaults.max_new_tokens is None
    own = load_defaults(folder_with(tmp_path, min_p=0.05, max_new_tokens=77, top_k=-1, top_p=None, temperature=0))
    assert own.sampling.stated_numbers == {"temperature": 0.0, "top_k": 0, "min_p": 0.05}
    assert own.max_new_tokens == 77


def test_what_a_service_uses_is_what_the_wire_holds(tmp_path: Path) -> None:
    sampling = load_defaults(folder_with(tmp_path, temperature=0.7)).sampling
    assert sampling.temperature != 0.7
    assert sampling.temperature == pytest.approx(0.7)


def test_none_leaves_the_file_alone_and_a_model_without_it_has_no_defaults(tmp_path: Path) -> None:
    for source in ("none", "vllm"):
        assert load_defaults(folder_with(tmp_path, temperature="hot"), source) == NO_DEFAULTS
    (tmp_path / "tiny.gguf").write_bytes(b"")
    assert load_defaults(str(tmp_path / "tiny.gguf")) == NO_DEFAULTS, "what lies beside it is not its own"
    (tmp_path / "generation_config.json").unlink()
    assert load_defaults(str(tmp_path)) == load_defaults("table:vocab=64") == NO_DEFAULTS


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": -1}, "must be in [0, 100]"),
        ({"temperature": True}, "must be a number"),
        ({"temperature": 10**400}, "must be in [0, 100]"),
        ({"top_k": "x"}, "must be a number"),
        ({"top_k": 2.5}, "must be a whole number"),
        ({"top_k": 1 << 40}, "must be in [0, 4294967295]"),
        ({"top_p": 0}, "must be in (0, 1]"),
        ({"min_p": 2}, "must be in [0, 1]"),
        ({"repetition_penalty": 0}, "must be in [0.01, 100]"),
        ({"max_new_tokens": 0}, "must be in [1, 4294967295]"),
    ],
)
def test_a_value_that_may_not_be_is_refused_by_file_and_field(
    tmp_path: Path, values: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        load_defaults(folder_with(tmp_path, **values))
    (name,) = values
    assert caught.value.message.startswith(f"{name} in {tmp_path / 'generation_config.json'} = ")
    assert words in caught.value.message


@pytest.mark.parametrize("text", ["{", "[]", "\udce9"])
def test_a_file_that_is_no_object_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    folder = folder_with(tmp_path)
    (tmp_path / "generation_config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InvalidInput, match=r"generation_config"):
        load_defaults(folder)


def test_one_line_says_what_is_set_and_one_what_is_not_applied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    unapplied = {"suppress_tokens": [5, 6], "no_repeat_ngram_size": 3, "num_beams": 4, "do_sample": False}
    neutral: dict[str, Any] = {
        "begin_suppress_tokens": None,
        "bad_words_ids": [],
        "typical_p": 1.0,
        "length_penalty": 1,
    }
    load_defaults(folder_with(tmp_path, temperature=0.6, **unapplied, **neutral))
    said, left_out = [record.getMessage() for record in caplog.records]
    assert "temperature=0.6" in said
    assert "--generation-config none" in said
    assert "not applied, as in vLLM: do_sample, no_repeat_ngram_size, num_beams, suppress_tokens (" in left_out
    caplog.clear()
    load_defaults(folder_with(tmp_path, eos_token_id=2, do_sample=True))
    assert not caplog.records


def test_a_request_overrides_each_default_also_by_the_number_that_it_had_without() -> None:
    defaults = GenerationDefaults(SamplingParams(0.7, 20, 0.8, 0.1, repetition_penalty=1.1)).sampling
    assert SamplingParams().with_defaults(defaults) == defaults
    for name in FIELDS_WITH_DEFAULTS:
        plain = getattr(SamplingParams(), name)
        stated = SamplingParams(**{name: type(plain).__mro__[2](plain)}).with_defaults(defaults)
        assert getattr(stated, name) == plain != getattr(defaults, name)
        assert {each: getattr(stated, each) for each in FIELDS_WITH_DEFAULTS if each != name} == {
            each: getattr(defaults, each) for each in FIELDS_WITH_DEFAULTS if each != name
        }
    assert SamplingParams().with_defaults() == SamplingParams()
    assert not any(
        isinstance(getattr(SamplingParams().with_defaults(), name), UnstatedNumber) for name in FIELDS_WITH_DEFAULTS
    )
