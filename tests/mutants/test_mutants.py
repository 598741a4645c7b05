"""The distribution of the text passes the exact algorithm and fails every mutant."""

from __future__ import annotations

from functools import cache

import pytest

from paceline.protocol.errors import PrefixMismatch
from paceline.protocol.proposal import Acceptance
from target_service.session import Session
from tests.e2e.statistics import LEVEL, chi_square_p, is_given_away
from tests.mutants import mutants, predictions, prefetches, processed, runs, texts, untrusted
from tests.mutants.rounds import BlockRounds, Rounds, enumerate_distribution

LENGTH = 4
SAMPLES = 8_000
"""What the least visible mutants need: those that forget the round in their keys."""

FEWER = SAMPLES // 4
EXACT = {
    Rounds: FEWER,
    BlockRounds: SAMPLES,
    mutants.DiscardedTokenChoosesK: SAMPLES // 2,
    mutants.KeepThenStop: SAMPLES // 8,
    # Drafts that don't do as they say, and bend nothing.
    untrusted.MisreportsQ: FEWER,
    untrusted.PeeksWithItsKey: FEWER,
    # What is copied.
    predictions.PredictedRounds: FEWER,
    texts.KeptCoupledText: FEWER,
}
"""Each with the samples that give its mutants away, as below."""
EXACT_TOO = (untrusted.MisreportsQToBlock, predictions.PredictedBlocks, texts.KeptCoupledTextForBlocks)
"""The same proposals under block acceptance, which has mutants and an exact algorithm of its own above."""
MUTANTS = {
    mutants.ResidualReusesDraftNoise: SAMPLES,
    mutants.DraftAndAcceptShareU: SAMPLES,
    mutants.OneUForARound: SAMPLES,
    mutants.DraftLooksAtU: SAMPLES,
    mutants.CoarserQ: SAMPLES,
    mutants.BlockWithPositionOnlyKeys: SAMPLES,
    mutants.DiscardedTokenChoosesKWithPositionOnlyKeys: SAMPLES,
    mutants.DrafterChosenByItsOwnDraw: SAMPLES,
    mutants.TrunkNoiseChoosesBranchLength: SAMPLES,
    mutants.TrimmedByItsOwnQ: SAMPLES,
    # Drafts that are trusted wrongly.
    untrusted.MisreportsQUnchecked: FEWER,
    untrusted.DropsWhatDisagrees: FEWER,
    untrusted.PeeksWithTheSeed: FEWER,
    untrusted.FitsQToItsNoise: FEWER,
    # Copies that are believed.
    predictions.BelievesThePrediction: FEWER,
    predictions.PredictsByWhatWasDrawn: FEWER,
    texts.KeptTextOfTheSameDraws: FEWER,
}
DISTRIBUTION = enumerate_distribution(LENGTH)


def check_exact(algorithm: type[Rounds], samples: int) -> None:
    assert chi_square_p([algorithm(seed).text(LENGTH) for seed in range(samples)], DISTRIBUTION) > LEVEL


@pytest.mark.parametrize("algorithm", EXACT, ids=lambda each: each.__name__)
def test_exact_algorithms_have_the_distribution(algorithm: type[Rounds]) -> None:
    check_exact(algorithm, EXACT[algorithm])


@pytest.mark.full
@pytest.mark.parametrize("algorithm", EXACT_TOO, ids=lambda each: each.__name__)
def test_exact_proposals_are_exact_for_blocks_too(algorithm: type[Rounds]) -> None:
    check_exact(algorithm, FEWER)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda each: each.__name__)
def test_the_distribution_gives_the_mutant_away(mutant: type[Rounds]) -> None:
    assert is_given_away(lambda seed: mutant(seed).text(LENGTH), DISTRIBUTION, MUTANTS[mutant])


PROCESSED_LENGTH = 6
PROCESSED_SAMPLES = 1_000
PROCESSED_DISTRIBUTIONS = {
    sampling: processed.enumerate_processed_distribution(PROCESSED_LENGTH, sampling)
    for sampling in (processed.SAMPLING, processed.PENALTIES)
}


@pytest.mark.parametrize(
    "algorithm",
    # Acceptance follows processing: `BlockRounds` tells the one, `ProcessedRounds` the other.
    [processed.ProcessedRounds, pytest.param(processed.ProcessedBlockRounds, marks=pytest.mark.full)],
    ids=lambda each: each.__name__,
)
def test_penalties_and_grammar_have_the_distribution(algorithm: type[processed.ProcessedRounds]) -> None:
    drawn = [algorithm(seed).text(PROCESSED_LENGTH) for seed in range(PROCESSED_SAMPLES)]
    assert chi_square_p(drawn, PROCESSED_DISTRIBUTIONS[algorithm.sampling]) > LEVEL


@pytest.mark.parametrize(
    "mutant",
    [processed.HistoryOffByOneRow, processed.PenaltiesKeptAfterRejection, processed.GrammarKeptForRejectedTokens],
    ids=lambda m: m.__name__,
)
def test_the_processed_distribution_gives_the_mutant_away(mutant: type[processed.ProcessedRounds]) -> None:
    distribution = PROCESSED_DISTRIBUTIONS[mutant.sampling]
    assert is_given_away(lambda seed: mutant(seed).text(PROCESSED_LENGTH), distribution, PROCESSED_SAMPLES)


REJECTION = (Acceptance.REJECTION, Acceptance.BLOCK)
SEEDS = range(12)
LEASE = (1, 3, 64)
Text = tuple[int, ...]


@cache
def sent_text(seed: int, acceptance: Acceptance = Acceptance.COUPLED) -> Text:
    """The text of rounds that are sent one by one, without proposals."""
    return runs.Runs(acceptance, seed).text(0)


@pytest.mark.parametrize("acceptance", list(Acceptance))
def test_a_run_draws_the_text_of_rounds_that_are_sent(acceptance: Acceptance) -> None:
    sent = [sent_text(seed, acceptance) for seed in SEEDS]
    assert {len(text) < runs.LENGTH for text in sent} == {True, False}, "some end early and some do not"
    for lease in LEASE:
        assert [runs.Runs(acceptance, seed).text(lease) for seed in SEEDS] == sent


@pytest.mark.parametrize(
    ("mutant", "acceptances"),
    [
        # Coupled draws carry no round key: there is nothing to get wrong.
        (runs.KeyedByItsLease, REJECTION),
        (runs.AtItsLeasesPosition, tuple(Acceptance)),
        (runs.ProcessorsDontSeeTheRun, tuple(Acceptance)),
        (runs.RunsOnBehindTheEnd, tuple(Acceptance)),
        (runs.RunsOnBeyondItsLength, tuple(Acceptance)),
    ],
    ids=lambda each: each.__name__ if isinstance(each, type) else "",
)
def test_the_text_gives_the_run_away(mutant: type[runs.Runs], acceptances: tuple[Acceptance, ...]) -> None:
    for acceptance in acceptances:
        assert any(mutant(acceptance, seed).text(64) != sent_text(seed, acceptance) for seed in SEEDS)


PREFETCHED_SEEDS = range(24)


def keeps_to_what_is_sent(kind: type[Session], lease: int = 0) -> bool:
    """Whether its texts are those of rounds that are sent, and it refuses none where the coordinator is."""

    def text(seed: int) -> Text:
        return prefetches.PrefetchedRounds(seed, lease=lease, kind=kind).text()

    try:
        return all(text(seed) == sent_text(seed) for seed in PREFETCHED_SEEDS)
    except PrefixMismatch:
        return False


@pytest.mark.parametrize(
    ("prefetching", "lease"), [(True, 0), (False, 0), (True, 2), (False, 2), (True, 16), (False, 16)]
)
def test_self_started_rounds_draw_the_text_of_rounds_that_are_sent(prefetching: bool, lease: int) -> None:
    """With what was prefetched, or where a mixed lease goes on without."""
    each = [prefetches.PrefetchedRounds(seed, prefetching=prefetching, lease=lease) for seed in PREFETCHED_SEEDS]
    assert [one.text() for one in each] == [sent_text(seed) for seed in PREFETCHED_SEEDS]
    started = sum(one.self_started for one in each)
    assert started > 24 if prefetching or lease else started == 0, "about half of the rounds"


@pytest.mark.parametrize(
    ("kind", "lease"),
    [
        (prefetches.GoesOnFromTheRoot, 16),
        (prefetches.GoesOnBehindTheWholeProposal, 16),
        (prefetches.WhateverTheNode, 0),
        (prefetches.WhateverTheNextToken, 0),
        (prefetches.KeepsTheFirstNodes, 0),
        (prefetches.KeyedAsIfAllWereAccepted, 0),
    ],
)
def test_the_text_or_a_refusal_gives_a_self_started_round_away(kind: type[Session], lease: int) -> None:
    assert not keeps_to_what_is_sent(kind, lease)


def test_the_seam_of_these_mutants_is_exact() -> None:
    assert keeps_to_what_is_sent(prefetches.SeamedSession)
