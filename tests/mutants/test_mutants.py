"""The distribution of the text passes the exact algorithm and fails every mutant."""

from __future__ import annotations

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
    untrusted.MisreportsQToBlock: FEWER,
    untrusted.PeeksWithItsKey: FEWER,
    # What is copied.
    predictions.PredictedRounds: FEWER,
    predictions.PredictedBlocks: FEWER,
    texts.KeptCoupledText: FEWER,
    texts.KeptCoupledTextForBlocks: FEWER,
}
"""Each with the samples that give its mutants away, as below."""
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


@pytest.mark.parametrize("algorithm", EXACT, ids=lambda each: each.__name__)
def test_exact_algorithms_have_the_distribution(algorithm: type[Rounds]) -> None:
    samples = [algorithm(seed).text(LENGTH) for seed in range(EXACT[algorithm])]
    assert chi_square_p(samples, DISTRIBUTION) > LEVEL


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda each: each.__name__)
def test_the_distribution_gives_the_mutant_away(mutant: type[Rounds]) -> None:
    assert is_given_away(lambda seed: mutant(seed).text(LENGTH), DISTRIBUTION, MUTANTS[mutant])


PROCESSED_LENGTH = 6
PROCESSED_SAMPLES = 1_000
PROCESSED_DISTRIBUTIONS = {
    sampling: processed.enumerate_processed_distribution(PROCESSED_LENGTH, sampling)
    for sampling in (processed.SAMPLING, processed.PENALTIES)
}


def processed_p_value(algorithm: type[processed.ProcessedRounds]) -> float:
    texts = [algorithm(seed).text(PROCESSED_LENGTH) for seed in range(PROCESSED_SAMPLES)]
    return chi_square_p(texts, PROCESSED_DISTRIBUTIONS[algorithm.sampling])


@pytest.mark.parametrize("algorithm", [processed.ProcessedRounds, processed.ProcessedBlockRounds])
def test_penalties_and_grammar_have_the_distribution(algorithm: type[processed.ProcessedRounds]) -> None:
    assert processed_p_value(algorithm) > LEVEL


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


def run_texts(algorithm: type[runs.Runs], acceptance: Acceptance, lease: int) -> list[tuple[int, ...]]:
    return [algorithm(acceptance, seed).text(lease) for seed in SEEDS]


@pytest.mark.parametrize("acceptance", list(Acceptance))
def test_a_run_draws_the_text_of_rounds_that_are_sent(acceptance: Acceptance) -> None:
    sent = run_texts(runs.Runs, acceptance, 0)
    assert {len(text) < runs.LENGTH for text in sent} == {True, False}, "some end early and some do not"
    for lease in LEASE:
        assert run_texts(runs.Runs, acceptance, lease) == sent


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
        assert run_texts(mutant, acceptance, 64) != run_texts(runs.Runs, acceptance, 0)


def prefetched_text(algorithm: type[prefetches.PrefetchedRounds], seed: int, lease: int = 0) -> tuple[int, ...] | str:
    """The text, or that the session refused to go on where the coordinator was."""
    try:
        return algorithm(seed, prefetches=True, lease=lease).text()
    except PrefixMismatch:
        return "refused"


def prefetched_texts(algorithm: type[prefetches.PrefetchedRounds], lease: int = 0) -> list[tuple[int, ...] | str]:
    return [prefetched_text(algorithm, seed, lease) for seed in range(24)]


def target_only_texts() -> list[tuple[int, ...] | str]:
    return [runs.Runs(Acceptance.COUPLED, seed).text(0) for seed in range(24)]


def test_self_started_rounds_draw_the_text_of_rounds_that_are_sent() -> None:
    sent: list[tuple[int, ...] | str] = []
    self_started = 0
    for seed in range(24):
        one = prefetches.PrefetchedRounds(seed, prefetches=True)
        assert one.text() == prefetches.PrefetchedRounds(seed, prefetches=False).text()
        sent.append(prefetches.PrefetchedRounds(seed, prefetches=False).text())
        self_started += one.self_started
    assert sent == target_only_texts()
    assert self_started > 24, "about half of the rounds"


@pytest.mark.parametrize("lease", [2, 16])
def test_rounds_of_a_mixed_lease_draw_the_text_of_rounds_that_are_sent(lease: int) -> None:
    assert prefetched_texts(prefetches.PrefetchedRounds, lease) == target_only_texts()
    bare = [prefetches.PrefetchedRounds(seed, prefetches=False, lease=lease) for seed in range(24)]
    assert [each.text() for each in bare] == target_only_texts()
    assert sum(each.self_started for each in bare) > 24, "where nothing is prefetched they go on, too"


@pytest.mark.parametrize("kind", [prefetches.GoesOnFromTheRoot, prefetches.GoesOnBehindTheWholeProposal])
def test_the_text_or_a_refusal_gives_away_a_round_of_a_mixed_lease_in_a_wrong_place(kind: type[Session]) -> None:
    assert prefetched_texts(prefetches.mutant(kind), 16) != target_only_texts()


@pytest.mark.parametrize(
    "kind",
    [
        prefetches.WhateverTheNode,
        prefetches.WhateverTheNextToken,
        prefetches.KeepsTheFirstNodes,
        prefetches.KeyedAsIfAllWereAccepted,
    ],
)
def test_the_text_or_a_refusal_gives_away_a_round_that_should_not_have_started(kind: type[Session]) -> None:
    assert prefetched_texts(prefetches.mutant(prefetches.SeamedSession)) == target_only_texts(), (
        "the seam itself is exact"
    )
    assert prefetched_texts(prefetches.mutant(kind)) != target_only_texts()
