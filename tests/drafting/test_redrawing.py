"""What a draft's mistake does to a request under rejection and block acceptance; an honest draft makes none."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from paceline.drafting import redrawing
from paceline.drafting import session as draft_session
from paceline.drafting.redrawing import MAX_MISTAKES, base_behind, redraw_proposal
from paceline.protocol.draft import DraftedProposal, DraftOpen
from paceline.protocol.generation import SpeculationSettings
from paceline.protocol.proposal import ROOT, Acceptance, Outcome, Proposal, SparseDistribution
from paceline.protocol.sampling import NoiseKey
from paceline.protocol.session import Close
from paceline.protocol.target import Round
from paceline.sampling.distribution import sparse_support, support_scores
from paceline.sampling.drafted import draft_key, redraw
from paceline.sampling.noise import Stream
from paceline.sampling.racing import race
from tests.coordinator.requests import PROMPT, VOCAB, DraftedRequest

PRE_DRAWN = [Acceptance.REJECTION, Acceptance.BLOCK]
SEED = NoiseKey(1)
"""The request's."""
K = 3
FIXED = SpeculationSettings(drafter="model", num_draft_tokens=K)
Supports = tuple[SparseDistribution, ...]


def supports(seed: int, nodes: int = K) -> Supports:
    rng = np.random.default_rng(seed)
    return tuple(sparse_support(rng.standard_normal(VOCAB).astype(np.float32)) for _ in range(nodes))


def drawn(base: int, key: NoiseKey, from_: Supports, number: int = 1) -> Proposal:
    """What a draft proposes that does as it should."""
    tokens = tuple(
        race(support_scores(support, VOCAB), key, Stream.DRAFT, position, base)
        for position, support in enumerate(from_, start=base + 1)
    )
    q = tuple(support.probability(token) for token, support in zip(tokens, from_, strict=True))
    return Proposal(number, tokens, q, supports=from_, drafter="model:near")


def with_another(proposal: Proposal, node: int) -> Proposal:
    """The same with another token of the support at a node."""
    support = proposal.supports[node]
    other = next(token for token in support.token_ids if token != proposal.token_ids[node])
    tokens, q = [*proposal.token_ids], [*proposal.draft_probabilities]
    tokens[node], q[node] = other, support.probability(other)
    return replace(proposal, token_ids=tuple(tokens), draft_probabilities=tuple(q))


async def proposed(request: DraftedRequest, proposal: Proposal, outcome: Outcome | None = None) -> Proposal | None:
    """A proposal is waited for and comes; what the next round carries."""
    session = request.link.last_id
    return (await request.drafting.take(lambda: request.drafts(outcome, proposal, session))).proposal


def key_of(request: DraftedRequest) -> NoiseKey:
    """What the latest open tells the draft."""
    return next(each.spec.noise for each in reversed(request.link.sent) if isinstance(each, DraftOpen))


def test_a_draft_is_told_the_seed_only_if_it_shares_the_targets_noise() -> None:
    assert key_of(DraftedRequest(FIXED)) == SEED
    for acceptance in PRE_DRAWN:
        assert key_of(DraftedRequest(FIXED, acceptance=acceptance)) == draft_key(SEED, acceptance) != SEED


@pytest.mark.parametrize("acceptance", PRE_DRAWN)
async def test_an_honest_draft_is_taken_at_its_word(acceptance: Acceptance, caplog: pytest.LogCaptureFixture) -> None:
    request = DraftedRequest(FIXED, acceptance=acceptance)
    sent = drawn(len(PROMPT) - 1, key_of(request), supports(0))
    assert await proposed(request, sent) is sent
    for number in range(1, 12):
        # All but the last were accepted.
        tokens = (number, number + 1, number + 2)[: 1 + number % 3]
        outcome = request.commit(tokens, node=len(tokens) - 2)
        sent = drawn(len(request.sequence.ids) - 1, key_of(request), supports(number), number + 1)
        assert await proposed(request, sent, outcome) is sent
    assert "draft failed" not in caplog.text


@pytest.mark.parametrize("acceptance", PRE_DRAWN)
@pytest.mark.parametrize("node", range(K))
async def test_a_token_that_its_q_does_not_give_is_replaced_and_named(
    acceptance: Acceptance, node: int, caplog: pytest.LogCaptureFixture
) -> None:
    request = DraftedRequest(FIXED, acceptance=acceptance)
    right = drawn(len(PROMPT) - 1, key_of(request), supports(0))
    wrong = with_another(right, node)
    request.link.take()
    assert await proposed(request, wrong) == right
    assert request.link.take_kinds() == [Close]
    named = f"drafter=model:near round={len(PROMPT) - 1} node={node} token={wrong.token_ids[node]}"
    assert caplog.text.count("draft failed") == 1
    assert named in caplog.text
    assert "session=1" in caplog.text
    assert f"draws {right.token_ids[node]} there" in caplog.text


@pytest.mark.parametrize("wrong", ["position", "round key", "sample", "the seed itself", "q"])
async def test_every_kind_of_mistake_is_mended(wrong: str, caplog: pytest.LogCaptureFixture) -> None:
    mended = 0
    for seed in range(8):
        request = DraftedRequest(FIXED, acceptance=Acceptance.REJECTION)
        base, key, from_ = len(PROMPT) - 1, key_of(request), supports(seed)
        right = drawn(base, key, from_)
        sent = {
            "position": drawn(base + 1, key, from_),
            "round key": drawn(base + 7, key, from_),
            "sample": drawn(base, NoiseKey(key.seed, 1), from_),
            "the seed itself": drawn(base, SEED, from_),
            "q": replace(drawn(base, key, supports(100 + seed)), supports=()),
        }[wrong]
        if not sent.supports:  # drawn from one q, sent with another that has these tokens, too
            mixed = tuple(SparseDistribution(tuple(range(VOCAB)), (1 / VOCAB,) * VOCAB) for _ in range(K))
            sent = replace(sent, supports=mixed, draft_probabilities=(1 / VOCAB,) * K)
            right = drawn(base, key, mixed)
        assert await proposed(request, sent) == right
        mended += sent.token_ids != right.token_ids
    assert mended >= 7
    assert caplog.text.count("draft failed") == mended


async def test_after_the_last_mistake_the_request_does_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(draft_session, "RETRY_MIN_S", 0.0)
    request = DraftedRequest(FIXED, acceptance=Acceptance.REJECTION)
    for number in range(MAX_MISTAKES):
        base = len(request.sequence.ids) - 1
        right = drawn(base, key_of(request), supports(number))
        # The session is new each time, and asked by its open.
        assert await proposed(request, with_another(right, 1)) == right
        request.advance((5,))
    assert len(request.link.take_only(DraftOpen)) == MAX_MISTAKES
    for _ in range(3):
        request.advance((6,))
        assert (await request.drafting.take(lambda: None)).proposal is None
    assert request.link.take_kinds() == []
    assert f"mistake {MAX_MISTAKES} of at most {MAX_MISTAKES}" in caplog.text
    assert "retry_in_s=inf" in caplog.text


async def test_a_mistake_in_what_no_round_carries_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Whether a draft goes on must not depend on tokens that are dropped."""
    request = DraftedRequest(FIXED, acceptance=Acceptance.REJECTION)
    base, key = len(PROMPT) - 1, key_of(request)
    assert await proposed(request, drawn(base, key, supports(0))) is not None
    request.dispatched()
    taken, other = Outcome(base, ROOT, 5), Outcome(base, 0, 9)
    request.drafts(other, with_another(drawn(base_behind(other), key, supports(2), 2), 0))
    right = drawn(base + 1, key, supports(1), 3)
    request.drafts(taken, right)
    request.commit((5,))
    assert (await request.drafting.take(lambda: None)).proposal is right
    assert "draft failed" not in caplog.text
    assert Close not in request.link.take_kinds()


async def test_a_prepared_mistake_is_replaced_too(caplog: pytest.LogCaptureFixture) -> None:
    request = DraftedRequest(FIXED, acceptance=Acceptance.BLOCK)
    base, key = len(PROMPT) - 1, key_of(request)
    assert await proposed(request, drawn(base, key, supports(0))) is not None
    request.dispatched()
    outcome = Outcome(base, ROOT, 5)
    right = drawn(base + 1, key, supports(1), 2)
    request.drafts(outcome, with_another(right, 2))
    request.commit((5,))
    assert (await request.drafting.take(lambda: None)).proposal == right
    assert f"round={base + 1} node=2" in caplog.text


def test_what_grows_is_drawn_again_where_it_has_grown() -> None:
    key, from_ = NoiseKey(3), supports(4, 6)
    whole = drawn(20, key, from_)
    wrong = with_another(whole, 1)
    with mock.patch.object(redrawing, "redraw", wraps=redraw) as draw:
        before = None
        for nodes in range(1, 7):
            before = redraw_proposal(DraftedProposal(1, None, wrong.first(nodes)), 20, key, before)
            assert before.proposal == whole.first(nodes)
            assert (before.mistake is not None) == (nodes > 1)
        assert draw.call_count == 6
        other = drawn(20, key, (*supports(5, 1), *from_[1:]))
        assert redraw_proposal(DraftedProposal(1, None, other), 20, key, before).proposal is other
        assert draw.call_count == 12, "another beginning is another proposal"


@pytest.mark.parametrize("nodes", range(4))
def test_the_base_behind_an_outcome_is_the_rounds(nodes: int) -> None:
    proposal = drawn(9, SEED, supports(0, nodes)) if nodes else None
    round_ = Round(1, 9, ROOT, (5,), proposal)
    for node in range(ROOT, nodes):
        outcome = Outcome(9, node, 7)
        assert base_behind(outcome) == round_.behind(outcome, drawn(9, SEED, supports(1))).base_length


async def test_an_outcome_that_no_counter_holds_ends_the_session(caplog: pytest.LogCaptureFixture) -> None:
    request = DraftedRequest(FIXED, acceptance=Acceptance.REJECTION)
    request.link.take()
    request.drafts(Outcome((1 << 32) - 1, 3, 5), drawn(9, draft_key(SEED, Acceptance.REJECTION), supports(0)))
    assert request.link.take_kinds() == [Close]
    assert "malformed proposal" in caplog.text
