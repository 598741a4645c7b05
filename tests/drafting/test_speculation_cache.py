from __future__ import annotations

from paceline.drafting.speculation_cache import MAX_ENTRIES, SpeculationCache
from paceline.protocol.draft import DraftedProposal
from paceline.protocol.proposal import Outcome, Proposal


def drafted(outcome: Outcome | None, token: int = 5) -> DraftedProposal:
    return DraftedProposal(1, outcome, Proposal(1, (token,), (1.0,)))


def put(cache: SpeculationCache[DraftedProposal], proposal: DraftedProposal) -> bool:
    return cache.put(proposal.outcome, proposal)


def test_a_proposal_is_taken_once_and_for_its_own_outcome_alone() -> None:
    cache = SpeculationCache[DraftedProposal]()
    cache.expect(None)
    assert put(cache, drafted(None))
    assert cache.take() == drafted(None)
    assert cache.take() is None
    cache.expect(Outcome(10, 0, 7))
    for other in (Outcome(10, 0, 8), Outcome(10, 1, 7), Outcome(9, 0, 7), None):
        assert not put(cache, drafted(other)), other
    assert cache.take() is None
    for token in (3, 4):
        put(cache, drafted(Outcome(12, 1, token), token))
    cache.expect(Outcome(12, 1, 4))
    assert cache.take() == drafted(Outcome(12, 1, 4), token=4), "it was there before its outcome"
    cache.expect(Outcome(12, 1, 3))
    assert cache.take() is None, "other outcomes went with the commit"


def test_it_is_bounded() -> None:
    cache = SpeculationCache[DraftedProposal]()
    cache.expect(Outcome(10, 0, 7))
    for token in range(2 * MAX_ENTRIES):
        put(cache, drafted(Outcome(12, 0, token)))
    cache.expect(Outcome(12, 0, MAX_ENTRIES))
    assert cache.take() is None
