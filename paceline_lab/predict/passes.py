"""Two teacher-forced passes over a text, on the engines that services run: the target's, then each drafter's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from paceline.engine.features import FeatureEngine
from paceline.engine.interface import Engine, Logits
from paceline.protocol.features import NO_FEATURES, FeatureNeed
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.sampling.distribution import greedy_tokens, log_softmax, probabilities, processed_scores
from paceline.sampling.noise import Stream
from paceline.sampling.racing import race, race_best
from paceline.sampling.ranking import largest_of_rows
from paceline_lab.predict.figures import RANKS, divergence, entropy, rank_reach
from paceline_lab.predict.positions import ENDLESS, DrafterPositions, TargetPositions
from paceline_training.corpus import Row
from paceline_training.evaluate import MAX_K, Reading, by_depth, overlap, read_text

PLAIN = SamplingParams(temperature=1.0)
"""Sampling parameters of figures where the temperature is 0."""


@dataclass(frozen=True, eq=False)
class SampleText:
    """A text of the sample, to be read.

    Attributes:
        row: its tokens, and which of them are positions.
        noise: the noise of the target's and the drafters' draws.
        own: whether the target wrote it at `row.temperature` with this noise.
    """

    row: Row
    noise: NoiseKey
    own: bool

    @property
    def params(self) -> SamplingParams:
        """Return the sampling parameters of its draws."""
        return SamplingParams(temperature=self.row.temperature)

    @property
    def answer_places(self) -> NDArray[np.intp]:
        """Return the places of its positions, [n]; the first token has nothing before it, so it is none."""
        places = np.flatnonzero(self.row.loss_mask)
        return places[places > 0]


def target_pass(engine: Engine, text: SampleText, need: FeatureNeed) -> tuple[TargetPositions, Reading]:
    """Run the target over a text; return its positions, and its logits and features for the drafters' pass.

    Raises:
        Unsupported: features are needed of an engine that gives none.
    """
    places = text.answer_places
    read = read_text(engine, text.row, places, need)
    text_tokens = text.row.token_ids[places].astype(np.int32)
    tokens = text_tokens.copy()
    figures = np.zeros((4, places.size))
    tops = np.zeros(places.size, np.int32)
    for place, logits in enumerate(read.logits):
        if not text.own:
            tokens[place] = _draw(logits, text, int(places[place]))
        p = chances_of(logits, text.params)
        tops[place] = p.argmax()
        logprob = log_softmax(logits)[text_tokens[place]]
        figures[:, place] = p[tokens[place]], p[tops[place]], logprob, entropy(p)
    roles = text.row.roles[places]
    return TargetPositions(places.astype(np.int32), roles, text_tokens, tokens, tops, *figures), read


def chances_of(logits: Logits, params: SamplingParams) -> NDArray[np.float64]:
    """Return the distribution that figures are of: [V] logits processed, at temperature 1 where it is 0."""
    return probabilities(processed_scores(logits[None], PLAIN if params.greedy else params)[0])


def _draw(logits: Logits, text: SampleText, position: int) -> int:
    """Return the target's draw at a position of a text that is not its own."""
    if text.params.greedy:
        return greedy_tokens(logits[None])[0]
    return race(processed_scores(logits[None], text.params)[0], text.noise, Stream.DRAFT, position)


def needed_features(drafter: Engine) -> FeatureNeed:
    """Return which of the target's hidden states a drafter reads."""
    return drafter.need if isinstance(drafter, FeatureEngine) else NO_FEATURES


def drafter_pass(drafter: Engine, text: SampleText, target: TargetPositions, read: Reading) -> DrafterPositions:
    """Run a drafter over the same text; one that reads features drafts from every place where a round may begin."""
    count = target.places.size
    arrays = _PositionArrays(count, MAX_K if isinstance(drafter, FeatureEngine) else 1)
    p_of = lru_cache(maxsize=MAX_K)(lambda place: chances_of(read.logits[place], text.params))
    for place, depth, logits in _rows_of(drafter, text, read):
        token = int(target.tokens[place])
        order = _order(logits, text, int(target.places[place]))
        p, q = p_of(place), chances_of(logits, text.params)
        rank = int(np.flatnonzero(order == token)[0]) + 1 if token in order else 0
        if text.params.greedy:
            arrays.reach[place, depth, rank - 1 :] = rank > 0
        else:
            arrays.reach[place, depth] = rank_reach(p, q, token)
        if depth == 0:
            arrays.ids[:, place] = rank, order[0], q.argmax()
            arrays.figures[:, place] = q[order[0]], q[token], overlap(p, q), divergence(p, q), entropy(q)
    return DrafterPositions(arrays.reach, np.full(count, ENDLESS, np.int32), *arrays.ids, *arrays.figures)


class _PositionArrays:
    """Arrays of a drafter's positions while they are filled: a position without figures is never accepted."""

    def __init__(self, count: int, depths: int) -> None:
        self.reach = np.zeros((count, depths, RANKS))
        self.ids = np.zeros((3, count), np.int32)
        self.ids[1:] = -1
        self.figures = np.zeros((5, count))


def _rows_of(drafter: Engine, text: SampleText, read: Reading) -> Iterator[tuple[int, int, Logits]]:
    """Yield position, depth, and the drafter's logits [V] before it."""
    if isinstance(drafter, FeatureEngine):
        yield from by_depth(drafter, text.row, text.answer_places, read.features)
        return
    for place, logits in enumerate(read_text(drafter, text.row, text.answer_places, NO_FEATURES).logits):
        yield place, 0, logits


def _order(logits: Logits, text: SampleText, position: int) -> NDArray[np.intp]:
    """Return a drafter's first choices, best first, as a draft service ranks them: [at most RANKS]."""
    if text.params.greedy:
        best = largest_of_rows(logits[None], RANKS)
        return np.asarray(best[best >= 0], np.intp)
    scores = processed_scores(logits[None], text.params)[0]
    return np.array(race_best(scores, RANKS, text.noise, Stream.DRAFT, position), np.intp)
