"""What a recovered token stands in place of, as the client is told."""

from __future__ import annotations

import pytest

from coordinator.text.outbox import merge
from coordinator.text.sequence import Sequence
from paceline.models.tokenizer import TableTokenizer
from paceline.protocol import codec
from paceline.protocol.errors import InvalidInput
from paceline.protocol.generation import Provenance, Tokens
from paceline.protocol.proposal import ROOT, Proposal
from paceline.protocol.target import Verdict
from paceline.sampling.acceptance import Decision
from tests.coordinator.requests import PROMPT, VOCAB, task_of

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
