"""The study of what predicts acceptance: its arithmetic by hand, and a whole one on table models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.predictors import correlation
from benchmarks.predictors.correlation import RankAgreement, bootstrapped, mean_ranks, spearman
from benchmarks.predictors.drafters import AS_IT_IS, DISTURBED, DisturbedEngine, LogitChange
from benchmarks.predictors.folds import NEW_KINDS, NEW_PROMPTS, folds_of
from benchmarks.predictors.of_drafters import (
    CALIBRATION,
    ORIENTED,
    REPLAY,
    DrafterSums,
    rank_drafters,
    tokens_a_round,
)
from benchmarks.predictors.of_positions import acceptance_by_cell, of_text, rank_positions
from benchmarks.predictors.of_prompts import match_outcome, matched_share, rank_prompts
from benchmarks.predictors.prior import foretold, prior_worth, requests_of
from benchmarks.predictors.reading import StudiedText, StudyWanted, read_study
from benchmarks.predictors.report import PredictorRanking, plots_of, text_of
from benchmarks.simulator.trace import TracedRequest
from paceline.engine.interface import StepItem, StepPlan
from paceline.engine.table.engine import load_table
from paceline.models.tokenizer import load_tokenizer
from paceline.predict import reading
from paceline.predict.figures import RANKS, calibration_error
from paceline.predict.positions import DrafterPositions

TARGET = "table:vocab=300,seed=1,contexts=64,max_length=2048"
DRAFT = "table:vocab=300,seed=1,contexts=64,noise=0.3,noise_seed=2,max_length=2048"


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correlation, "RESAMPLES", 40)


def test_ranks_with_ties_and_their_correlation() -> None:
    assert mean_ranks(np.array([3.0, 1.0, 3.0, 0.0])).tolist() == [3.5, 2.0, 3.5, 1.0]
    assert spearman(np.array([1.0, 2.0, 4.0]), np.array([10.0, 20.0, 21.0])) == pytest.approx(1)
    assert spearman(np.array([1.0, 2.0, 3.0]), np.array([3.0, 1.0, 2.0])) == pytest.approx(-0.5)
    assert np.isnan(spearman(np.array([1.0, 1.0]), np.array([1.0, 2.0])))


def test_prompts_are_resampled_whole() -> None:
    values = np.array([0.0, 0.0, 1.0, 1.0])
    found = bootstrapped(lambda sample: float(values[list(sample)].mean()), 4, resamples=4000)
    # The mean of four draws is binomial: P(0 of 4) = P(4 of 4) = 1/16 > 2.5 %.
    assert (found.rho, found.low, found.high) == (0.5, 0.0, 1.0)
    assert np.isnan(bootstrapped(lambda sample: float("nan"), 3).low)


def test_a_disturbed_draft_is_the_same_draft_with_other_logits() -> None:
    plan = StepPlan((StepItem(1, 0, (5, 6), logit_rows=(0, 1)),))

    def logits(change: LogitChange | None, seed: int = 0) -> np.ndarray:
        inner = load_table(DRAFT)
        engine = inner if change is None else DisturbedEngine(inner, change, seed)
        engine.open(1, 8)
        return engine.step(plan)[0]

    plain, noisy = logits(None), logits(LogitChange(noise=1.5))
    assert logits(LogitChange()) == pytest.approx(plain)
    assert logits(LogitChange(sharpness=2.0)) == pytest.approx(2 * plain, rel=1e-5)
    added = noisy - plain
    assert added[0] == pytest.approx(added[1], abs=1e-5), "the same at every position"
    assert 1.2 < added[0].std() < 1.8
    assert logits(LogitChange(noise=1.5)) == pytest.approx(noisy)


def test_tokens_a_round_of_certain_drafters() -> None:
    for chance, tokens in ((1.0, 5.0), (0.0, 1.0)):
        rounds, found = tokens_a_round(np.full(20, chance))
        assert found / rounds == pytest.approx(tokens)


def test_rounds_of_matches_follow_what_was_right(study: list[StudiedText]) -> None:
    text, reach = study[0], np.zeros((7, 4, RANKS))
    reach[1, 0] = reach[2, 1] = 1  # a match from position 1 on: two right, then one wrong
    reach[5, 0] = reach[6, 1] = 1  # from position 5 on: right to the text's end
    zeros = np.zeros(7)
    choices = np.array([0, 9, 8, 0, 0, 7, 7], np.int32)
    offered = np.array([0, 3, 0, 0, 0, 4, 4], np.int32)
    match = DrafterPositions(reach, offered, choices, choices, choices, zeros, zeros, zeros, zeros, zeros)
    made = replace(text, answer=replace(text.answer, drafters={"ngram": match}))
    assert match_outcome(made, 0) == pytest.approx(7 / 4), "0 | 1 2 3 | 4 | 5 6"
    assert matched_share(match, np.array([0, 9, 8, 7, 6, 7, 5], np.int32), slice(None)) == pytest.approx(2 / 7)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> list[StudiedText]:
    wanted = StudyWanted(("chat", "story"), prompts=2, answer_tokens=40)
    folder = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "check_language", lambda texts, vocab_size: None)  # a table's law knows no English
        return read_study(load_table(TARGET), load_table(DRAFT), load_tokenizer(TARGET), wanted, 0.0, folder)


def test_halves_are_of_prompts_or_of_kinds(study: list[StudiedText]) -> None:
    assert [(text.kind, text.number) for text in study] == [("chat", 0), ("chat", 1), ("story", 0), ("story", 1)]
    assert folds_of(study, NEW_PROMPTS).tolist() == [0, 1, 0, 1]
    assert folds_of(study, NEW_KINDS).tolist() == [0, 0, 1, 1]


def test_sums_give_each_drafter_s_own_figures(study: list[StudiedText]) -> None:
    sums, chosen, some = DrafterSums.of(study), [*DISTURBED].index("flatter"), np.array([0, 2])
    reads = [study[i].answer.drafters["flatter"] for i in some]
    accepted = np.concatenate([each.accepted for each in reads])
    confidence = np.concatenate([each.confidence for each in reads])
    error = calibration_error(confidence, accepted)
    assert -sums.predicted(CALIBRATION, some)[chosen] == pytest.approx(error)
    assert sums.predicted("coupled acceptance", some)[chosen] == pytest.approx(accepted.mean())
    kl = np.concatenate([each.divergences for each in reads])
    assert -sums.predicted("KL", some)[chosen] == pytest.approx(kl.mean())
    rounds, tokens = np.sum([tokens_a_round(each.accepted) for each in reads], axis=0)
    assert sums.outcome(some)[chosen] == pytest.approx(tokens / rounds)


def test_a_draft_is_ranked_by_itself_best(study: list[StudiedText]) -> None:
    found = rank_drafters(study, folds_of(study, NEW_PROMPTS))
    assert found.keys() == ORIENTED.keys()
    assert found[REPLAY].rho > 0.8
    assert found[REPLAY].rho > found["draft confidence"].rho + 0.3, "overconfident drafters are not good ones"
    assert found[REPLAY].low <= found[REPLAY].rho <= found[REPLAY].high


def test_positions_and_prompts_are_ranked_by_what_is_known(study: list[StudiedText]) -> None:
    folds = folds_of(study, NEW_PROMPTS)
    arrays = of_text(study[0], acceptance_by_cell(study[1:]))
    right = study[0].answer.drafters[AS_IT_IS].ranks == 1
    assert arrays["the position before"].tolist() == [1, *right[:-1]]
    assert all(values.shape == right.shape for values in arrays.values())
    positions = rank_positions(study, folds)
    said = np.concatenate([text.answer.drafters[AS_IT_IS].confidence for text in study])
    hit = np.concatenate([text.answer.drafters[AS_IT_IS].ranks == 1 for text in study])
    assert positions["draft confidence"].rho == pytest.approx(spearman(said, hit.astype(float)))
    prompts = rank_prompts(study, folds)
    assert {*prompts} == {"draft", "ngram"}
    assert not np.isnan(prompts["draft"]["known prompts of its kind"].rho)


def test_the_report_has_every_cell_and_the_best_first() -> None:
    agreement = {"poor": RankAgreement(0.1, -0.2, 0.3), "good": RankAgreement(0.8, 0.7, 0.9)}
    silent = {"good": RankAgreement(0.6, 0.5, 0.7), "poor": RankAgreement(float("nan"), float("nan"), float("nan"))}
    rankings = [
        PredictorRanking("a:b", 0.0, NEW_PROMPTS, "drafters", agreement),
        PredictorRanking("a:b", 1.0, NEW_KINDS, "drafters", silent),
    ]
    text = text_of(rankings)
    assert "| good | 0.70 | 0.80 (0.70 to 0.90) | 0.60 (0.50 to 0.70) |" in text
    assert text.index("| good |") < text.index("| poor | 0.10 |")
    (plot,) = plots_of(rankings)
    assert plot.groups == ["good", "poor"]
    assert plot.bars[1].values[1] is None


def test_a_prior_is_worth_what_it_changes() -> None:
    """Texts all of whose drafted tokens are right, or none: alone, and in turn."""
    easy, hard = (TracedRequest((rank,) * 32, (0.6,) * 32, (0,) * 32, (0,) * 32, prompt_tokens=8) for rank in (1, 0))
    in_turn, _ = prior_worth("made", 0.0, [easy, hard] * 3)
    assert in_turn.foretold > 1.01 * in_turn.earlier_requests, "what others had says nothing of either"
    assert in_turn.most == pytest.approx(in_turn.foretold / in_turn.earlier_requests - 1)
    for alike in prior_worth("made", 0.0, [easy] * 6):
        assert alike.earlier_requests > 1.005 * alike.nothing_known, "what was seen of equal requests helps"
    assert foretold(easy).chances(4) == pytest.approx([1] * 4, abs=0.01)
    assert foretold(hard).chances(1) == pytest.approx([0], abs=0.01)


def test_the_study_s_requests_are_what_was_read(study: list[StudiedText]) -> None:
    requests = requests_of(study)
    ranks = study[1].answer.drafters[AS_IT_IS].ranks
    assert requests[1].ranks == tuple(ranks.tolist())
    assert requests[1].prompt_tokens == len(study[1].prompt.tokens)
