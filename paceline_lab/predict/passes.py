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
"""What figures are told at where the temperature is 0."""


@dataclass(frozen=True, eq=False)
class SampleText:
    """A text of the sample, as it is read.

    Attributes:
        row: its tokens, and which of them are positions.
        noise: what target and drafters draw with.
        own: whether the target wrote it at `row.temperature` with this noise.
    """

    row: Row
    noise: NoiseKey
    own: bool

    @property
    def params(self) -> SamplingParams:
        """Of its draws."""
        return SamplingParams(temperature=self.row.temperature)

    @property
    def learned(self) -> NDArray[np.intp]:
        """[n] places of its positions; the first token has nothing before it."""
        places = np.flatnonzero(self.row.loss_mask)
        return places[places > 0]


def target_pass(engine: Engine, text: SampleText, need: FeatureNeed) -> tuple[TargetPositions, Reading]:
    """The target reads a text: its positions, and its logits and features for the drafters' pass.

    Raises:
        Unsupported: features are needed of an engine that gives none.
    """
    learned = text.learned
    read = read_text(engine, text.row, learned, need)
    written = text.row.token_ids[learned].astype(np.int32)
    tokens = written.copy()
    figures = np.zeros((4, learned.size))
    tops = np.zeros(learned.size, np.int32)
    for place, logits in enumerate(read.logits):
        if not text.own:
            tokens[place] = _drawn(logits, text, int(learned[place]))
        p = shown(logits, text.params)
        tops[place] = p.argmax()
        logprob = log_softmax(logits)[written[place]]
        figures[:, place] = p[tokens[place]], p[tops[place]], logprob, entropy(p)
    places = learned.astype(np.int32)
    return TargetPositions(places, text.row.roles[learned], written, tokens, tops, *figures), read


def shown(logits: Logits, params: SamplingParams) -> NDArray[np.float64]:
    """The distribution that figures are told of: [V] logits processed, at temperature 1 where it is 0."""
    return probabilities(processed_scores(logits[None], PLAIN if params.greedy else params)[0])


def _drawn(logits: Logits, text: SampleText, position: int) -> int:
    """What the target says at a position of a text that is not its own."""
    if text.params.greedy:
        return greedy_tokens(logits[None])[0]
    return race(processed_scores(logits[None], text.params)[0], text.noise, Stream.DRAFT, position)


def needed_features(drafter: Engine) -> FeatureNeed:
    """What of the target's hidden states a drafter reads."""
    return drafter.need if isinstance(drafter, FeatureEngine) else NO_FEATURES


def drafter_pass(drafter: Engine, text: SampleText, target: TargetPositions, read: Reading) -> DrafterPositions:
    """A drafter reads the same text; one that reads features from every place where a round may begin."""
    count = target.places.size
    found = _PositionsInMaking(count, MAX_K if isinstance(drafter, FeatureEngine) else 1)
    p_of = lru_cache(maxsize=MAX_K)(lambda place: shown(read.logits[place], text.params))
    for place, depth, logits in _rows_of(drafter, text, read):
        token = int(target.tokens[place])
        order = _order(logits, text, int(target.places[place]))
        p, q = p_of(place), shown(logits, text.params)
        rank = int(np.flatnonzero(order == token)[0]) + 1 if token in order else 0
        if text.params.greedy:
            found.reach[place, depth, rank - 1 :] = rank > 0
        else:
            found.reach[place, depth] = rank_reach(p, q, token)
        if depth == 0:
            found.ids[:, place] = rank, order[0], q.argmax()
            found.figures[:, place] = q[order[0]], q[token], overlap(p, q), divergence(p, q), entropy(q)
    return DrafterPositions(found.reach, np.full(count, ENDLESS, np.int32), *found.ids, *found.figures)


class _PositionsInMaking:
    """Arrays of a drafter's positions before they are full: positions that nothing is said of are never accepted."""

    def __init__(self, count: int, depths: int) -> None:
        self.reach = np.zeros((count, depths, RANKS))
        self.ids = np.zeros((3, count), np.int32)
        self.ids[1:] = -1
        self.figures = np.zeros((5, count))


def _rows_of(drafter: Engine, text: SampleText, read: Reading) -> Iterator[tuple[int, int, Logits]]:
    """Position, depth, and the drafter's logits [V] before it."""
    if isinstance(drafter, FeatureEngine):
        yield from by_depth(drafter, text.row, text.learned, read.features)
        return
    for place, logits in enumerate(read_text(drafter, text.row, text.learned, NO_FEATURES).logits):
        yield place, 0, logits


def _order(logits: Logits, text: SampleText, position: int) -> NDArray[np.intp]:
    """A drafter's first choices, best first, as a draft service ranks them: [at most RANKS]."""
    if text.params.greedy:
        best = largest_of_rows(logits[None], RANKS)
        return np.asarray(best[best >= 0], np.intp)
    scores = processed_scores(logits[None], text.params)[0]
    return np.array(race_best(scores, RANKS, text.noise, Stream.DRAFT, position), np.intp)
