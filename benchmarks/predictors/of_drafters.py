"""Which figure of known texts ranks drafters as new texts will: by tokens a round, replayed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.predictors.correlation import RankAgreement, bootstrapped, spearman
from benchmarks.predictors.drafters import DISTURBED
from benchmarks.predictors.reading import StudiedText
from paceline.predict.positions import DrafterPositions, TargetPositions
from paceline.train.evaluate import rounds_of

K = 4
"""Tokens proposed in a replayed round; the outcome of every ranking."""
BINS = 10
"""Of confidence, for the calibration error."""
REPLAY = "replayed tokens a round"
CALIBRATION = "calibration error"
ORIENTED: Mapping[str, int] = {
    REPLAY: 1,
    "coupled acceptance": 1,
    "agreement of first choices": 1,
    "overlap, 1 - TV": 1,
    "KL": -1,
    "entropy overlap": 1,
    CALIBRATION: -1,
    "draft confidence": 1,
    "draft entropy": -1,
}
"""Predictors, and whether more of each should mean more tokens a round."""


def tokens_a_round(accepted: NDArray[np.float64]) -> tuple[float, float]:
    """Expected rounds and tokens of a chain drafter that replays a text at `K`.

    Args:
        accepted: [positions] chance that a token drafted there is accepted.
    """
    rounds, reached = rounds_of(np.repeat(accepted[:, None], K, axis=1), K)
    return rounds, rounds + float(reached.sum())


def entropy_overlap(target: TargetPositions, drafter: DrafterPositions) -> NDArray[np.float64]:
    """[n] the smaller entropy over the greater one; 1 where both are 0."""
    both = np.stack([target.entropies, drafter.entropies])
    most = both.max(axis=0)
    return np.where(most > 0, both.min(axis=0) / np.maximum(most, 1e-12), 1.0)


@dataclass(frozen=True, eq=False)
class DrafterSums:
    """Sums over each text's positions, from which any sample's figures follow.

    Attributes:
        positions: [texts].
        means: predictor → [drafters, texts] sums, of predictors that are means over positions.
        gaps: [drafters, texts, BINS] of right - confidence.
        rounds, tokens: [drafters, texts] replayed.
    """

    positions: NDArray[np.float64]
    means: Mapping[str, NDArray[np.float64]]
    gaps: NDArray[np.float64]
    rounds: NDArray[np.float64]
    tokens: NDArray[np.float64]

    @classmethod
    def of(cls, texts: Sequence[StudiedText]) -> DrafterSums:
        """Fold the answers of all disturbed drafters."""
        names = [name for name in ORIENTED if name not in (REPLAY, CALIBRATION)]
        shape = len(DISTURBED), len(texts)
        means = {name: np.zeros(shape) for name in names}
        gaps, rounds, tokens = np.zeros((*shape, BINS)), np.zeros(shape), np.zeros(shape)
        for i, drafter in enumerate(DISTURBED):
            for j, text in enumerate(texts):
                read = text.answer.drafters[drafter]
                for name, values in _of_positions(text.answer.target, read).items():
                    means[name][i, j] = values.sum()
                bins = np.minimum((read.confidence * BINS).astype(int), BINS - 1)
                gaps[i, j] = np.bincount(bins, read.accepted - read.confidence, BINS)
                rounds[i, j], tokens[i, j] = tokens_a_round(read.accepted)
        positions = np.array([text.answer.target.places.size for text in texts], float)
        return cls(positions, means, gaps, rounds, tokens)

    def outcome(self, sample: NDArray[np.intp]) -> NDArray[np.float64]:
        """[drafters] tokens a round over the sampled texts."""
        return np.asarray(self.tokens[:, sample].sum(axis=1) / self.rounds[:, sample].sum(axis=1))

    def predicted(self, name: str, sample: NDArray[np.intp]) -> NDArray[np.float64]:
        """[drafters] what a predictor says by the sampled texts, greater for better."""
        if name == REPLAY:
            return self.outcome(sample)
        count = self.positions[sample].sum()
        if name == CALIBRATION:
            return np.asarray(ORIENTED[name] * np.abs(self.gaps[:, sample].sum(axis=1)).sum(axis=1) / count)
        return np.asarray(ORIENTED[name] * self.means[name][:, sample].sum(axis=1) / count)


def _of_positions(target: TargetPositions, drafter: DrafterPositions) -> dict[str, NDArray[np.float64]]:
    return {
        "coupled acceptance": drafter.accepted,
        "agreement of first choices": (drafter.ranks == 1).astype(float),
        "overlap, 1 - TV": drafter.overlaps,
        "KL": drafter.divergences,
        "entropy overlap": entropy_overlap(target, drafter),
        "draft confidence": drafter.confidence,
        "draft entropy": drafter.entropies,
    }


def rank_drafters(texts: Sequence[StudiedText], folds: NDArray[np.intp]) -> dict[str, RankAgreement]:
    """For each predictor: Spearman's ρ over drafters, known texts against new ones, the mean of both ways round."""
    sums = DrafterSums.of(texts)

    def statistic(name: str, sample: Sequence[int]) -> float:
        chosen = np.array(sample)
        sides = [chosen[folds[chosen] == fold] for fold in (0, 1)]
        if not all(side.size for side in sides):
            return float("nan")
        ways = (sides, sides[::-1])
        return float(np.mean([spearman(sums.predicted(name, known), sums.outcome(new)) for known, new in ways]))

    return {
        name: bootstrapped(lambda sample, name=name: statistic(name, sample), len(texts))  # type: ignore[misc]
        for name in ORIENTED
    }
