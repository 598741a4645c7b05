"""Which figure ranks a new text's positions by whether the token drafted there is accepted. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.predictors.correlation import RankAgreement, bootstrapped, spearman
from benchmarks.predictors.drafters import AS_IT_IS
from benchmarks.predictors.of_drafters import entropy_overlap
from benchmarks.predictors.reading import StudiedText
from paceline.protocol.proposal import NGRAM

PRIOR_POSITIONS = 8.0
"""Of the mean, mixed into each fitted cell. Chosen, not tuned."""
AFTER = ("overlap, 1 - TV", "KL", "entropy overlap", "target entropy")
"""Need the target's own distribution: known only once the position has been verified."""
Arrays = dict[str, NDArray[np.float64]]


def rank_positions(texts: Sequence[StudiedText], folds: NDArray[np.intp]) -> dict[str, RankAgreement]:
    """For each predictor: Spearman's ρ with whether the drafted token was the target's draw, over new positions.

    Prompts are resampled whole. What is fitted is fitted to the other fold.
    """
    known = [[text for text, side in zip(texts, folds, strict=True) if side != fold] for fold in (0, 1)]
    cells = [acceptance_by_cell(some) for some in known]
    arrays = [of_text(text, cells[fold]) for text, fold in zip(texts, folds, strict=True)]
    right = [(text.answer.drafters[AS_IT_IS].ranks == 1).astype(float) for text in texts]

    def statistic(name: str, sample: Sequence[int]) -> float:
        said = np.concatenate([arrays[i][name] for i in sample])
        return spearman(said, np.concatenate([right[i] for i in sample]))

    return {
        name: bootstrapped(lambda sample, name=name: statistic(name, sample), len(texts))  # type: ignore[misc]
        for name in arrays[0]
    }


def of_text(text: StudiedText, cells: dict[str, float]) -> Arrays:
    """[n] of each predictor, greater for better."""
    target, draft, match = text.answer.target, text.answer.drafters[AS_IT_IS], text.answer.drafters[NGRAM]
    right = (draft.ranks == 1).astype(float)
    runs = _runs_before(right)
    return {
        "overlap, 1 - TV": draft.overlaps,
        "KL": -draft.divergences,
        "entropy overlap": entropy_overlap(target, draft),
        "target entropy": -target.entropies,
        "draft confidence": draft.confidence,
        "draft entropy": -draft.entropies,
        "the position before": (runs > 0).astype(float),
        "run of accepted before": runs,
        "n-gram match's score": match.confidence,
        "draft agrees with match": ((match.choices == draft.choices) & (match.offered > 0)).astype(float),
        "kind of drafted token": np.array([cells.get(cell, cells[""]) for cell in text.drafted_cells]),
    }


def acceptance_by_cell(texts: Sequence[StudiedText]) -> dict[str, float]:
    """Share of accepted tokens by the drafted token's cell, mixed with the mean; the mean itself under ""."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for text in texts:
        for cell, rank in zip(text.drafted_cells, text.answer.drafters[AS_IT_IS].ranks, strict=True):
            found[cell].append(float(rank == 1))
    every = [value for values in found.values() for value in values]
    mean = float(np.mean(every))
    shares = {
        cell: (sum(values) + PRIOR_POSITIONS * mean) / (len(values) + PRIOR_POSITIONS)
        for cell, values in found.items()
    }
    return {"": mean, **shares}


def _runs_before(right: NDArray[np.float64]) -> NDArray[np.float64]:
    """[n] consecutive accepted positions right before each; a text begins as if one had been."""
    runs = np.zeros(right.size)
    run = 1.0
    for place, value in enumerate(right):
        runs[place] = run
        run = run + 1 if value else 0.0
    return runs
