"""The winners of a race, decided on the host among a device's candidates, by the definition. Pure.

`paceline.engine.cuda.noise` shows that no other id can have won. Candidates that filters leave out are passed over
(`paceline.engine.cuda.filters`). Where a row's candidates don't suffice (ids of which too little is known lie within
the margin, or scores overflow) the whole row is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.engine.cuda.filters import SHARE_ERROR
from paceline.engine.cuda.noise import margin
from paceline.engine.interface import DrawnTokens, Logits, RankedTokens, Ranking
from paceline.protocol.errors import InvalidInput
from paceline.protocol.sampling import SamplingParams
from paceline.sampling.distribution import probabilities, processed_scores, ratios_to
from paceline.sampling.noise import Stream
from paceline.sampling.racing import race_among, race_best
from paceline.sampling.ranking import largest_of_rows

Candidates = NDArray[np.float64]
"""[n, 3 + 3 · count]: a floor, then as `race_candidates` has it.

No other id that may be drawn has a value above the floor. Ids that filters leave out, or may leave out, come last
with a value of -inf.
"""
_TINY = np.finfo(np.float32).tiny


def candidates_of(
    numbers: NDArray[np.float64],
    count: int,
    vocab_size: int,
    temperatures: NDArray[np.float32],
    filters: NDArray[np.float64],
) -> Candidates:
    """The candidates of rows that a device has raced.

    Args:
        numbers: [n, 2 + 3 · count], as `race_candidates` has it, or [n, 2 + 4 · count]: `shares_before` follow.
        count: of each row.
        vocab_size: V.
        temperatures: [n]; 0: greedy.
        filters: [n, 3]: top_k, top_p, min_p.
    """
    end = 2 + 3 * count
    head, (values, ids, logits) = numbers[:, :2], numbers[:, 2:end].reshape(len(numbers), 3, count).swapaxes(0, 1)
    floors = values[:, -1:] if count < vocab_size else np.full((len(numbers), 1), -np.inf)
    if numbers.shape[1] > end:
        scores = _scores_of(np.column_stack((head[:, 0], logits)), temperatures)
        with np.errstate(invalid="ignore"):
            ratios = ratios_to(scores[:, :1], scores[:, 1:])
        is_kept, is_open = _judge(numbers[:, end:], ratios, filters)
        open_values = np.where(is_open, values, -np.inf)
        floors = np.maximum(floors, open_values.max(axis=1, keepdims=True))
        values = np.where(is_kept, values, -np.inf)
        order = np.argsort(-values, axis=1, kind="stable")
        values, ids, logits = (np.take_along_axis(each, order, axis=1) for each in (values, ids, logits))
    return np.concatenate((floors, head, values, ids, logits), axis=1)


def _judge(
    shares: NDArray[np.float64], ratios: NDArray[np.float64], filters: NDArray[np.float64]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which candidates [n, count] filters keep for certain, and of which top-p says nothing for certain.

    Args:
        shares: [n, count], as `shares_before` has them.
        ratios: [n, count]: probabilities over the largest one.
        filters: [n, 3]: top_k, top_p, min_p.
    """
    top_p, min_p = filters[:, 1:2], filters[:, 2:]
    may_be_kept = (shares < np.where(top_p < 1, top_p + SHARE_ERROR, np.inf)) & ~(ratios < min_p)
    # The first is always kept, and its share is exact.
    is_kept = may_be_kept & ((top_p >= 1) | (shares < top_p - SHARE_ERROR) | (shares == 0))
    return is_kept, may_be_kept & ~is_kept


class ClearTokens(NamedTuple):
    """The best tokens of raced rows, best first, as many as the row asks for that asks for most.

    Attributes:
        token_ids: [n, most]
        probabilities: [n, most] float32: their softmax at the temperature, greedy at 1.
        is_clear: [n]: whether the device's order is the definition's; if not, the host must decide.
    """

    token_ids: NDArray[np.intp]
    probabilities: NDArray[np.float32]
    is_clear: NDArray[np.bool_]

    def of(self, rows: slice) -> ClearTokens:
        """Some of the rows."""
        return ClearTokens(self.token_ids[rows], self.probabilities[rows], self.is_clear[rows])


def clear_tokens(candidates: Candidates, temperatures: NDArray[np.float32], counts: NDArray[np.intp]) -> ClearTokens:
    """The best tokens of all rows of a step at once, and where no other order is possible.

    A drawn row is clear where each of its tokens leads the next value, and the floor, by more than the margin. A
    greedy one needs its last above the floor: its values are the logits themselves, and equal ones go by id.

    Args:
        candidates: of all rows of a step.
        temperatures: [n]; 0: greedy.
        counts: [n]: how many tokens each row is asked for, at least 1.
    """
    if not len(candidates):
        return ClearTokens(np.empty((0, 0), np.intp), np.empty((0, 0), np.float32), np.empty(0, np.bool_))
    floors, log_sums = candidates[:, :1], candidates[:, 2:3]
    values, ids, logits = np.split(candidates[:, 3:], 3, axis=1)
    is_greedy = (temperatures == 0)[:, None]
    order = np.lexsort((np.where(is_greedy, ids, 0), -values), axis=1)
    values, ids, logits = (np.take_along_axis(each, order, axis=1) for each in (values, ids, logits))
    followers = np.maximum(np.column_stack((values[:, 1:], floors)), floors)
    most = min(int(counts.max(initial=1)), values.shape[1])
    with np.errstate(invalid="ignore", over="ignore"):
        leads = np.where(is_greedy, floors < values, followers < values - margin(values)) & np.isfinite(values)
        is_finite = np.isfinite(_scores_of(candidates[:, 1:2], temperatures)) & np.isfinite(log_sums)
        softmax = np.exp(_scores_of(logits[:, :most], temperatures).astype(np.float64) - log_sums)
    beyond = np.arange(values.shape[1]) >= counts[:, None]
    is_clear = (leads | beyond).all(axis=1) & is_finite[:, 0] & (counts <= values.shape[1])
    probabilities = np.clip(softmax, _TINY, 1).astype(np.float32)
    return ClearTokens(ids[:, :most].astype(np.intp), probabilities, is_clear)


def _scores_of(logits: NDArray[np.float64], temperatures: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scores of float32 logits [n, m], whose temperatures are [n]; 0: greedy, which counts as 1."""
    divisors = np.where(temperatures == 0, np.float32(1), temperatures)[:, None]
    with np.errstate(over="ignore"):
        return np.asarray(logits.astype(np.float32) / divisors, np.float32)


@dataclass(frozen=True)
class RacedRows:
    """One item's rows, raced on a device: a `Drawing` and `RankedRows`.

    `whole` reads the item's logits [n, V], which are there until the next step.
    """

    ranking: Ranking
    candidates: Candidates
    whole: Callable[[], Logits]
    clear: ClearTokens | None = None
    """Of these rows."""

    def drawn_tokens(self) -> DrawnTokens:
        """The best token of each row."""
        if self.clear is not None and self.clear.is_clear.all():
            return DrawnTokens(tuple(self.clear.token_ids[:, 0].tolist()))
        return DrawnTokens(tuple(tokens[0] for tokens in self._best()))

    def ranked_tokens(self) -> tuple[RankedTokens, ...]:
        """The best tokens of each row with their softmax."""
        if self.clear is not None and self.clear.is_clear.all():
            token_ids, probabilities, _ = self.clear
            count = self.ranking.count
            pairs = zip(token_ids[:, :count].tolist(), probabilities[:, :count].tolist(), strict=True)
            return tuple(RankedTokens(tuple(ids), tuple(softmax)) for ids, softmax in pairs)
        rows = []
        for place, tokens in enumerate(self._best()):
            softmax = self._softmax_of_candidates(tokens, self.candidates[place])
            if softmax is None:
                softmax = self._softmax_of_whole(tokens, place)
            rows.append(RankedTokens(tokens, tuple(np.clip(softmax, _TINY, 1).astype(np.float32).tolist())))
        return tuple(rows)

    def _softmax_of_candidates(self, tokens: tuple[int, ...], row: Candidates) -> Candidates | None:
        """[len(tokens)]; None: a token is not among the candidates, or their sum is not finite."""
        _, ids, logits = self._columns(row)
        logit_of = dict(zip(ids.tolist(), logits.tolist(), strict=True))
        if not (np.isfinite(row[2]) and logit_of.keys() >= {*tokens}):
            return None
        token_logits = np.array([logit_of[token] for token in tokens], np.float32)
        scores = (token_logits / self._softmax_temperature).astype(np.float64)
        return np.asarray(np.exp(scores - row[2]), np.float64)

    def _softmax_of_whole(self, tokens: tuple[int, ...], place: int) -> Candidates:
        """[len(tokens)]"""
        sampling = SamplingParams(temperature=float(self._softmax_temperature))
        scores = processed_scores(self.whole()[place : place + 1], sampling)[0]
        return probabilities(scores)[list(tokens)]

    @property
    def _softmax_temperature(self) -> np.float32:
        return np.float32(self.ranking.temperature or 1)

    def _best(self) -> list[tuple[int, ...]]:
        largest = self.candidates[:, 1].astype(np.float32)
        bad = largest[~np.isfinite(largest)]
        if bad.size:
            raise InvalidInput.of("largest logit", float(bad[0]), "finite")
        if self._overflows(largest):
            return self._best_of_whole(range(len(largest)))
        best = [self._best_of_row(row, place) for place, row in enumerate(self.candidates)]
        open_places = [place for place, tokens in enumerate(best) if tokens is None]
        others = iter(self._best_of_whole(open_places) if open_places else ())
        return [next(others) if tokens is None else tokens for tokens in best]

    def _overflows(self, largest: NDArray[np.float32]) -> bool:
        with np.errstate(over="ignore"):
            return not (self.ranking.greedy or np.isfinite(largest / np.float32(self.ranking.temperature)).all())

    def _columns(self, row: Candidates) -> tuple[Candidates, NDArray[np.intp], NDArray[np.float32]]:
        """Values by the device's arithmetic, best first, ids and logits."""
        values, ids, logits = row[3:].reshape(3, -1)
        return values, ids.astype(np.intp), logits.astype(np.float32)

    def _best_of_row(self, row: Candidates, place: int) -> tuple[int, ...] | None:
        """None: ids beyond the candidates may be among the best."""
        values, ids, logits = self._columns(row)
        ranking = self.ranking
        last = values[min(ranking.count, values.size) - 1]
        least = last if ranking.greedy else last - margin(last)
        if row[0] >= least and row[0] > -np.inf:
            return None
        near = (values >= least) & (values > -np.inf)
        if ranking.greedy:
            return tuple(ids[near][np.lexsort((ids[near], -logits[near]))[: ranking.count]].tolist())
        scores = logits[near] / np.float32(ranking.temperature)
        position = ranking.positions[place]
        return race_among(scores, ids[near], ranking.count, ranking.noise, Stream.DRAFT, position)

    def _best_of_whole(self, places: Sequence[int]) -> list[tuple[int, ...]]:
        """The best of some rows, by the definition alone."""
        ranking, logits = self.ranking, self.whole()[places]
        if ranking.greedy:
            return [tuple(ids[ids >= 0].tolist()) for ids in largest_of_rows(logits, ranking.count)]
        scores = processed_scores(logits, ranking.sampling)
        return [
            race_best(row, ranking.count, ranking.noise, Stream.DRAFT, ranking.positions[place])
            for row, place in zip(scores, places, strict=True)
        ]
