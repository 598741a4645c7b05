"""Which figure of a prompt ranks new requests by the tokens a round that they will have. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.predictors.correlation import RankAgreement, bootstrapped, spearman
from benchmarks.predictors.drafters import AS_IT_IS
from benchmarks.predictors.of_drafters import entropy_overlap, tokens_a_round
from benchmarks.predictors.reading import StudiedText
from paceline.predict.positions import DrafterPositions, calibration_of
from paceline.protocol.proposal import NGRAM

EARLY = 16
"""Positions of an answer that count as its first rounds; the outcome is of those behind them."""
MATCHED = 16
"""Tokens of a match that a replayed round follows."""


def rank_prompts(texts: Sequence[StudiedText], folds: NDArray[np.intp]) -> dict[str, dict[str, RankAgreement]]:
    """For the draft and for matches, each predictor's Spearman's ρ with tokens a round, over prompts.

    What a kind's known prompts had is fitted to the other fold; the rest is read off each prompt.
    """
    long = [place for place, text in enumerate(texts) if text.answer.target.places.size > 2 * EARLY]
    found: dict[str, dict[str, RankAgreement]] = {}
    for drafter, outcome in (("draft", draft_outcome), (NGRAM, match_outcome)):
        values = np.array([outcome(text, EARLY) for text in texts])
        arrays = {name: np.array([of_prompt(text)[name] for text in texts]) for name in of_prompt(texts[0])}
        arrays["known prompts of its kind"] = _of_kind(texts, folds, values)

        def statistic(
            name: str,
            sample: Sequence[int],
            arrays: dict[str, NDArray[np.float64]] = arrays,
            values: NDArray[np.float64] = values,
        ) -> float:
            chosen = np.array([long[i] for i in sample])
            kept = chosen[~np.isnan(arrays[name][chosen])]
            return spearman(arrays[name][kept], values[kept])

        found[drafter] = {
            name: bootstrapped(lambda sample, name=name: statistic(name, sample), len(long))  # type: ignore[misc]
            for name in arrays
        }
    return found


def of_prompt(text: StudiedText) -> dict[str, float]:
    """What is known of a request, greater for better; the last two after its first `EARLY` tokens alone."""
    target, draft, match = text.prompt.target, text.prompt.drafters[AS_IT_IS], text.prompt.drafters[NGRAM]
    early = text.answer.drafters[AS_IT_IS].ranks[:EARLY] == 1
    early_matches = matched_share(text.answer.drafters[NGRAM], text.answer.target.tokens, slice(0, EARLY))
    return {
        "n-grams of the prompt": matched_share(match, target.written, slice(None)),
        "length of the prompt": float(target.places.size),
        "share of code, numbers, marks": float(np.mean([_is_marked(cell) for cell in text.prompt_cells])),
        "draft's log-probability of the prompt": float(np.log(np.maximum(draft.chances, 1e-9)).mean()),
        "draft confidence on the prompt": float(draft.confidence.mean()),
        "draft entropy on the prompt": -float(draft.entropies.mean()),
        "overlap on the prompt": float(draft.overlaps.mean()),
        "KL on the prompt": -float(draft.divergences.mean()),
        "entropy overlap on the prompt": float(entropy_overlap(target, draft).mean()),
        "calibration error on the prompt": -calibration_of([draft]),
        "coupled acceptance on the prompt": float(draft.accepted.mean()),
        "first tokens accepted": float(early.mean()),
        "first tokens matched": early_matches,
    }


def matched_share(match: DrafterPositions, tokens: NDArray[np.int32], places: slice) -> float:
    """Share of positions where a match's first token was the text's own."""
    return float(((match.choices == tokens) & (match.offered > 0))[places].mean())


def draft_outcome(text: StudiedText, first: int) -> float:
    """Tokens a round of the draft behind the first positions."""
    rounds, tokens = tokens_a_round(text.answer.drafters[AS_IT_IS].accepted[first:])
    return tokens / rounds if rounds else float("nan")


def match_outcome(text: StudiedText, first: int) -> float:
    """Tokens a round of matches behind the first positions: what was right of each match, up to `MATCHED`."""
    reach = text.answer.drafters[NGRAM].reach[:, :, 0]  # [n, depths], of the token at each depth of a round
    count, depths = reach.shape
    place, rounds = first, 0
    while place < count:
        right = 0
        while right < min(MATCHED, depths) and place + right < count and reach[place + right, right] > 0:
            right += 1
        place += right + 1
        rounds += 1
    return (count - first) / rounds if rounds else float("nan")


def _of_kind(
    texts: Sequence[StudiedText], folds: NDArray[np.intp], values: NDArray[np.float64]
) -> NDArray[np.float64]:
    """[texts] mean outcome of the other fold's prompts of the same kind; nan where there are none."""
    kinds = np.array([text.kind for text in texts])
    found = np.full(len(texts), np.nan)
    for place in range(len(texts)):
        alike = values[(kinds == kinds[place]) & (folds != folds[place])]
        if alike.size:
            found[place] = alike.mean()
    return found


def _is_marked(cell: str) -> bool:
    part, _, kind = cell.partition("/")
    return part == "code" or kind in ("number", "punctuation")
