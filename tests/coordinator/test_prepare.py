"""What a request is checked for once the model is known."""

from __future__ import annotations

import math
import re
import time
from dataclasses import replace

import pytest

from coordinator.prepare import ServedModel, prepare
from paceline.models.tokenizer import load_tokenizer
from paceline.protocol import codec
from paceline.protocol.errors import InvalidInput, Unsupported
from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.protocol.sampling import Grammar, GrammarKind, NoiseKey, SamplingParams
from paceline.protocol.session import MAX_TIME_LEFT_MS
from paceline.protocol.target import TargetOpen

ENDLESS = ServedModel("m", load_tokenizer("table:vocab=64"), 100, ("auto",))
ENDING = ServedModel("m", load_tokenizer("table:vocab=64,eos=9"), 100, ("auto",))
GRAMMAR = Grammar(GrammarKind.REGEX, "a+")


def request(sampling: SamplingParams, **changes: object) -> GenerateRequest:
    return GenerateRequest(**{"token_ids": (1, 2), "sampling": sampling, "seed": 3, **changes})  # type: ignore[arg-type]


def test_a_model_without_an_end_takes_no_grammar() -> None:
    with pytest.raises(Unsupported, match="regex: the model has no token that ends a text"):
        prepare(request(SamplingParams(grammar=GRAMMAR)), ENDLESS)
    assert prepare(request(SamplingParams(grammar=GRAMMAR)), ENDING).eos_token_ids == {9}


def test_an_end_token_alone_is_no_bad_word() -> None:
    with pytest.raises(InvalidInput, match=re.escape("bad_words = (9,): must be no end token alone")):
        prepare(request(SamplingParams(bad_words=((3,), (9,)))), ENDING)


@pytest.mark.parametrize(("tokens", "rows"), [(10, 76), (33, 99), (34, 100), (35, 100), (98, 100)])
def test_rows_are_counted_on_for_a_proposal_as_far_as_the_target_announces(tokens: int, rows: int) -> None:
    task = prepare(request(SamplingParams(), max_new_tokens=tokens), ENDLESS)
    assert (task.max_length, task.max_rows) == (2 + tokens, rows)


def test_the_sample_keys_the_noise() -> None:
    assert prepare(request(SamplingParams(), sample_index=5), ENDING).noise == NoiseKey(3, 5)


@pytest.mark.parametrize("left_s", [-1.0, 0.0, 10.0, 4_294_968.0, 5e6, 1e300, math.inf])
def test_what_is_left_of_a_deadline_is_what_the_services_can_be_told(left_s: float) -> None:
    task = prepare(request(SamplingParams()), ENDING, deadline=time.monotonic() + left_s)
    most = min(max(1, left_s * 1e3), MAX_TIME_LEFT_MS)
    assert task.time_left_ms is not None
    assert most - 5_000 <= task.time_left_ms <= most
    opened = TargetOpen(1, task.spec((*task.prompt, 1), ""))
    assert codec.decode_target_command(codec.encode_target_command(opened)) == opened


def test_the_drafter_none_is_speculation_switched_off() -> None:
    named = SpeculationSettings(drafter="none")
    assert named == SpeculationSettings(off=True)
    assert SpeculationSettings(drafter="mtp").drafter == "model:mtp"
    sent = codec.decode_generate_request(codec.encode_generate_request(request(SamplingParams(), speculation=named)))
    assert prepare(sent, ENDING).speculation.off
    message = codec.encode_generate_request(request(SamplingParams()))
    message.speculation.drafter = "none"
    assert codec.decode_generate_request(message).speculation == named
    with pytest.raises(InvalidInput, match="drafter = 'oracle': must be one of: auto, none"):
        prepare(request(SamplingParams(), speculation=SpeculationSettings(drafter="oracle")), ENDING)


def test_a_drafter_may_be_that_of_a_draft_service_that_was_never_linked() -> None:
    """A coordinator that has just started must refuse nothing that it will serve."""
    wanted = request(SamplingParams(), speculation=SpeculationSettings(drafter="model"))
    assert prepare(wanted, replace(ENDING, knows_drafters=False)).speculation.drafter == "model"
    with pytest.raises(InvalidInput, match="drafter = 'model'"):
        prepare(wanted, ENDING)
