"""A text's spans of reasoning where the model's markers are several tokens: a byte each, here."""

from __future__ import annotations

import pytest

from coordinator.text.sequence import Sequence
from paceline.models.reasoning import ReasoningMarks
from paceline.models.tokenizer import TransformersTokenizer
from paceline.protocol.generation import Provenance
from paceline.protocol.proposal import ROOT
from paceline.protocol.target import Verdict
from paceline.sampling.acceptance import Decision
from tests.coordinator.requests import task_of
from tests.gateway.templates import OPENED, THINKING
from tests.models.saving import byte_level_tokenizer


def sequence_of(template: str, resumed: str) -> tuple[Sequence, TransformersTokenizer]:
    inner = byte_level_tokenizer()
    inner.chat_template = template
    tokenizer = TransformersTokenizer(inner)
    prompt = tokenizer.render_turns([{"role": "user", "content": "why"}])
    task = task_of(prompt=prompt, resume_token_ids=tuple(tokenizer.encode(resumed)), max_length=999)
    return Sequence(task, tokenizer, ReasoningMarks.from_tokenizer(tokenizer)), tokenizer


@pytest.mark.parametrize(
    ("template", "resumed", "text", "reasons_behind"),
    [
        pytest.param(OPENED, "", "so</think>it", "so</think", id="opened by the template"),
        pytest.param(THINKING, "", "<think>so</think>it", ">so</think", id="opened by the model"),
        pytest.param(THINKING, "<thi", "nk>so</think>it", ">so</think", id="resumed within the marker"),
    ],
)
def test_a_round_begins_inside_behind_the_opening_marker_s_last_token(
    template: str, resumed: str, text: str, reasons_behind: str
) -> None:
    sequence, tokenizer = sequence_of(template, resumed)
    inside = ""
    for letter, token_id in zip(text, tokenizer.encode(text), strict=True):
        sequence.commit(Decision(ROOT, (), token_id, Provenance.TARGET), None, Verdict(1, 2, (token_id,)))
        inside += letter if sequence.reasoning else ""
    assert inside == reasons_behind
