"""The best of what a text repeats and what its request predicts, and the proposals that follow it."""

from __future__ import annotations

import pytest

from coordinator.text.matches import Matches
from paceline.protocol.proposal import NGRAM, PREDICTION, ROOT, Outcome, Proposal
from paceline.protocol.target import Round

PROMPT = (1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2)
"""Ends as it began: what follows is 3, 4, …"""
PREDICTED = tuple(range(20, 60))


def matches(prediction: tuple[int, ...] = PREDICTED, *, ngrams: bool = True) -> Matches:
    found = Matches(len(PROMPT), prediction, ngrams=ngrams)
    found.extend(PROMPT)
    return found


def round_behind(proposal: Proposal | None) -> Round:
    return Round(1, 10, ROOT, (2,), proposal)


def test_the_more_trustworthy_of_text_and_prediction_is_followed() -> None:
    found = matches()
    assert found.proposal(7, 3, 1, coupled=True) == Proposal(7, (20, 21, 22), (1.0,) * 3, drafter=PREDICTION)
    found.extend((*PROMPT, 3, 4, 5))
    assert found.best is not None
    assert (found.best.drafter, found.best.following[:2]) == (NGRAM, (6, 7))
    assert found.proposal(8, 2, 1, coupled=True).drafter == NGRAM
    found.extend((*PROMPT, 3, 4, 5, *PREDICTED[:9]))
    assert found.best.drafter == PREDICTION
    assert found.best.following == PREDICTED[9:]


def test_the_prediction_alone_is_followed_where_the_text_is_not_searched() -> None:
    found = matches(ngrams=False)
    assert found.exist
    assert found.proposal(1, 4, 3, coupled=False).token_ids == PREDICTED[:4]
    assert not Matches(3, (), ngrams=False).exist
    assert matches((), ngrams=False).best is None


def test_a_tree_begins_with_the_prediction_and_has_the_text_s_matches_beside_it() -> None:
    tree = matches().proposal(1, 3, 2, coupled=True)
    assert tree.token_ids == (20, 21, 22, 3, 4, 5)
    assert tree.parents == (ROOT, 0, 1, ROOT, 3, 4)


@pytest.mark.parametrize(
    ("proposed", "node", "token", "behind"), [((), ROOT, 20, (21, 22, 23)), ((20, 21), 1, 22, (23, 24, 25))]
)
def test_what_follows_a_round_is_ready_for_the_outcome_that_the_prediction_says(
    proposed: tuple[int, ...], node: int, token: int, behind: tuple[int, ...]
) -> None:
    proposal = Proposal(1, proposed, (1.0,) * len(proposed)) if proposed else None
    found = matches().prefetch_proposal(5, round_behind(proposal), lambda match, k, outcome: 3)
    assert found == (Outcome(10, node, token), Proposal(5, behind, (1.0,) * 3, drafter=PREDICTION))


@pytest.mark.parametrize("proposed", [(20, 99), PREDICTED, PREDICTED[:-1]], ids=["another", "all", "all but one"])
def test_nothing_is_ready_behind_other_tokens_or_beyond_the_end(proposed: tuple[int, ...]) -> None:
    proposal = Proposal(1, proposed, (1.0,) * len(proposed))
    assert matches().prefetch_proposal(5, round_behind(proposal), lambda match, k, outcome: 3) is None


def test_at_its_end_only_what_is_left_is_proposed() -> None:
    found = matches()
    found.extend((*PROMPT, *PREDICTED[:-2]))
    assert found.proposal(1, 30, 1, coupled=True).token_ids == PREDICTED[-2:]
