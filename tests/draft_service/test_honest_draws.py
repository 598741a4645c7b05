"""What a model drafter proposes is what a coordinator draws again: no false alarm, in whatever it drafts."""

from __future__ import annotations

import random

import pytest

from paceline.drafting.redrawing import base_behind, redraw_proposal
from paceline.protocol.draft import DraftBudget, DraftedProposal
from paceline.protocol.proposal import ROOT, Acceptance, Outcome, Proposal
from paceline.protocol.sampling import NoiseKey, SamplingParams
from tests.draft_service.driving import SPEC, Driver

SAMPLINGS = [
    SamplingParams(0.0),
    SamplingParams(0.3),
    SamplingParams(1.0),
    SamplingParams(7.0),
    SamplingParams(0.8, top_k=5),
    SamplingParams(1.2, top_p=0.7, min_p=0.05),
    SamplingParams(1.0, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias=((3, 5.0),), bad_words=((7,),)),
]


@pytest.mark.parametrize(
    ("sampling", "acceptance"),
    [
        pytest.param(sampling, rule, marks=[pytest.mark.full] * ((at + place) % 2))  # one rule each in CI
        for at, sampling in enumerate(SAMPLINGS)
        for place, rule in enumerate((Acceptance.REJECTION, Acceptance.BLOCK))
    ],
)
def test_every_token_of_every_proposal_is_redrawn(sampling: SamplingParams, acceptance: Acceptance) -> None:
    """Proposals waited for and prepared, cut, behind other drafters' rounds, behind outcomes that nobody foresaw."""
    budget, tokens = DraftBudget(max_tokens=4, fan_out=3), 0
    for seed in range(6):
        source = random.Random(seed)
        driver = Driver(acceptance=acceptance, sampling=sampling, seed=seed)
        for _ in range(5):
            base = len(driver.committed) - 1
            if driver.offer is None or source.random() < 0.5:
                tokens += honest(driver.draft(budget), base, seed)
            inline = Proposal(0, (5, 6), (1.0, 1.0)) if source.random() < 0.3 else None
            driver.verify(budget, source.randint(0, len(driver.offer or ())), inline)
            driver.run(source.randint(1, 9))
            for (node, token), proposal in driver.prepared.items():
                tokens += honest(proposal, base_behind(Outcome(base, node, token)), seed)
            nodes = len(driver.verified or ())
            foreseen = [*driver.prepared] if source.random() < 0.7 else []
            driver.commit(source.choice(foreseen or [(source.randrange(ROOT, nodes), source.randrange(SPEC.vocab))]))
    assert tokens > 300


def honest(proposal: Proposal, base_length: int, seed: int) -> int:
    """Its length, if no token is another when drawn again."""
    assert redraw_proposal(DraftedProposal(1, None, proposal), base_length, NoiseKey(seed)).mistake is None
    assert len(proposal.supports) == len(proposal)
    return len(proposal)
