"""A text as rounds are committed to it: what a recovered token replaces, and where reasoning begins and ends."""

from __future__ import annotations

import pytest

from coordinator.text.outbox import merge
from coordinator.text.sequence import Sequence
from paceline.models.reasoning import reasoning_marks
from paceline.models.tokenizer import TableTokenizer, TransformersTokenizer
from paceline.protocol import codec
from paceline.protocol.errors import InvalidInput
from paceline.protocol.generation import Provenance, Tokens
from paceline.protocol.proposal import ROOT, Proposal
from paceline.protocol.target import Verdict
from paceline.sampling.acceptance import Decision
from tests.coordinator.requests import PROMPT, VOCAB, task_of
from tests.gateway.templates import OPENED, THINKING
from tests.models.saving import byte_level_tokenizer

CHAIN = Proposal(1, (10, 11, 12), (1.0, 1.0, 1.0))
TREE = Proposal(1, (10, 20, 11, 21), (1.0,) * 4, parents=(ROOT, ROOT, 0, 1))
RECOVERED, BONUS = Provenance.RECOVERED, Provenance.BONUS


def committed(decision: Decision, proposal: Proposal | None, room: int = 9) -> Tokens:
    sequence = Sequence(task_of(max_length=len(PROMPT) + room), TableTokenizer(VOCAB, None))
    # Only log-probabilities are read from the verdict, and none are asked for.
    return sequence.commit(decision, proposal, Verdict(1, 2, (0,)))


@pytest.mark.parametrize(
    ("decision", "proposal", "replaced"),
    [
        pytest.param(Decision(ROOT, (), 30, RECOVERED), CHAIN, (10,), id="the first of a chain"),
        pytest.param(Decision(1, (10, 11), 30, RECOVERED), CHAIN, (12,), id="behind two accepted ones"),
        pytest.param(Decision(2, (10, 11, 12), 30, BONUS), CHAIN, (), id="a bonus replaces nothing"),
        pytest.param(Decision(ROOT, (), 30, Provenance.TARGET), None, (), id="nothing was proposed"),
        pytest.param(Decision(ROOT, (), 30, RECOVERED), TREE, (10,), id="of siblings the first"),
        pytest.param(Decision(1, (20,), 30, RECOVERED), TREE, (21,), id="on the accepted path"),
    ],
)
def test_a_recovered_token_names_the_proposed_one(
    decision: Decision, proposal: Proposal | None, replaced: tuple[int, ...]
) -> None:
    assert committed(decision, proposal).replaced_token_ids == replaced


def test_a_recovered_token_beyond_the_end_of_the_text_names_nothing() -> None:
    tokens = committed(Decision(1, (10, 11), 30, RECOVERED), CHAIN, room=2)
    assert (tokens.token_ids, tokens.replaced_token_ids) == ((10, 11), ())


def test_merged_messages_name_all_of_them_in_order() -> None:
    decisions = Decision(1, (10, 11), 30, RECOVERED), Decision(ROOT, (), 31, RECOVERED)
    merged = merge([committed(decision, CHAIN) for decision in decisions])
    assert merged.provenance.count(RECOVERED) == 2
    assert merged.replaced_token_ids == (12, 10)


def test_more_replaced_tokens_than_recovered_ones_are_refused() -> None:
    message = codec.encode_generate_event(committed(Decision(ROOT, (), 30, RECOVERED), CHAIN))
    message.tokens.replaced_token_ids.append(9)
    with pytest.raises(InvalidInput, match="replaced_token_ids = 2: must be 0 or 1"):
        codec.decode_generate_event(message)


def sequence_of(template: str, resumed: str) -> tuple[Sequence, TransformersTokenizer]:
    """A text whose markers of reasoning are several tokens: a byte each, here."""
    inner = byte_level_tokenizer()
    inner.chat_template = template
    tokenizer = TransformersTokenizer(inner)
    prompt = tokenizer.render_turns([{"role": "user", "content": "why"}])
    task = task_of(prompt=prompt, resume_token_ids=tuple(tokenizer.encode(resumed)), max_length=999)
    return Sequence(task, tokenizer, reasoning_marks(tokenizer)), tokenizer


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
