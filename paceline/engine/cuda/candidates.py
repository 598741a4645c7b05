"""The winners of a race, decided on the host among a device's candidates, by the definition. Pure.

`paceline.engine.cuda.noise` shows that no other id can have won. Where a row's candidates don't suffice (more ids
lie within the margin than there are candidates, or scores overflow) the whole row is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.engine.cuda.noise import margin
from paceline.engine.interface import DrawnTokens, Logits, RankedTokens, Ranking
from paceline.protocol.errors import InvalidInput
from paceline.protocol.sampling import SamplingParams
from paceline.sampling.distribution import probabilities, processed_scores
from paceline.sampling.noise import Stream
from paceline.sampling.racing import race_among, race_best
from paceline.sampling.ranking import largest_of_rows

Candidates = NDArray[np.float64]
"""[n, 2 + 3 · count], as `race_candidates` has it."""
_TINY = np.finfo(np.float32).tiny


def clear_winners(candidates: Candidates, temperatures: NDArray[np.float32]) -> NDArray[np.intp]:
    """The winner of each row whose best value leads by more than the margin, so that no other id can have won.

    Args:
        candidates: of all rows of a step.
        temperatures: [n]; 0: greedy.

    Returns:
        [n]; -1 where the host must decide: others are near, or numbers are not finite.
    """
    count = (candidates.shape[1] - 2) // 3
    if count < 2:
        return np.full(len(candidates), -1, np.intp)
    largest, best, second = candidates[:, 0].astype(np.float32), candidates[:, 2], candidates[:, 3]
    with np.errstate(over="ignore", invalid="ignore"):
        scores = largest / np.where(temperatures == 0, np.float32(1), temperatures)
        is_clear = np.isfinite(scores) & np.isfinite(best) & (second < best - margin(best))
    return np.where(is_clear, candidates[:, 2 + count], -1).astype(np.intp)


@dataclass(frozen=True)
class RacedRows:
    """One item's rows, raced on a device: a `Drawing` and `RankedRows`.

    `whole` reads the item's logits [n, V], which are there until the next step.
    """

    ranking: Ranking
    candidates: Candidates
    vocab_size: int
    whole: Callable[[], Logits]
    clear_winners: NDArray[np.intp] | None = None
    """[n] as `clear_winners` has them."""

    def drawn_tokens(self) -> DrawnTokens:
        """The best token of each row."""
        if self.clear_winners is not None and (tokens := self.clear_winners.tolist()) and min(tokens) >= 0:
            return DrawnTokens(tuple(tokens))
        return DrawnTokens(tuple(tokens[0] for tokens in self._best()))

    def ranked_tokens(self) -> tuple[RankedTokens, ...]:
        """The best tokens of each row with their softmax."""
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
        if not (np.isfinite(row[1]) and logit_of.keys() >= {*tokens}):
            return None
        token_logits = np.array([logit_of[token] for token in tokens], np.float32)
        scores = (token_logits / self._softmax_temperature).astype(np.float64)
        return np.asarray(np.exp(scores - row[1]), np.float64)

    def _softmax_of_whole(self, tokens: tuple[int, ...], place: int) -> Candidates:
        """[len(tokens)]"""
        sampling = SamplingParams(temperature=float(self._softmax_temperature))
        scores = processed_scores(self.whole()[place : place + 1], sampling)[0]
        return probabilities(scores)[list(tokens)]

    @property
    def _softmax_temperature(self) -> np.float32:
        return np.float32(self.ranking.temperature or 1)

    def _best(self) -> list[tuple[int, ...]]:
        largest = self.candidates[:, 0].astype(np.float32)
        bad = largest[~np.isfinite(largest)]
        if bad.size:
            raise InvalidInput.of("largest logit", float(bad[0]), "finite")
        if self._overflows(largest):
            return self._best_of_whole()
        best = [self._best_of_row(row, place) for place, row in enumerate(self.candidates)]
        winners = [tokens for tokens in best if tokens is not None]
        return winners if len(winners) == len(best) else self._best_of_whole()

    def _overflows(self, largest: NDArray[np.float32]) -> bool:
        with np.errstate(over="ignore"):
            return not (self.ranking.greedy or np.isfinite(largest / np.float32(self.ranking.temperature)).all())

    def _columns(self, row: Candidates) -> tuple[Candidates, NDArray[np.intp], NDArray[np.float32]]:
        """Values by the device's arithmetic, best first, ids and logits."""
        values, ids, logits = row[2:].reshape(3, -1)
        return values, ids.astype(np.intp), logits.astype(np.float32)

    def _best_of_row(self, row: Candidates, place: int) -> tuple[int, ...] | None:
        """None: ids beyond the candidates may be among the best."""
        values, ids, logits = self._columns(row)
        ranking = self.ranking
        last = values[min(ranking.count, values.size) - 1]
        least = last if ranking.greedy else last - margin(last)
        if values.size < self.vocab_size and values[-1] >= least > -np.inf:
            return None
        near = (values >= least) & (logits > -np.inf)
        if ranking.greedy:
            return tuple(ids[near][np.lexsort((ids[near], -logits[near]))[: ranking.count]].tolist())
        scores = logits[near] / np.float32(ranking.temperature)
        position = ranking.positions[place]
        return race_among(scores, ids[near], ranking.count, ranking.noise, Stream.DRAFT, position)

    def _best_of_whole(self) -> list[tuple[int, ...]]:
        ranking, logits = self.ranking, self.whole()
        if ranking.greedy:
            return [tuple(ids[ids >= 0].tolist()) for ids in largest_of_rows(logits, ranking.count)]
        scores = processed_scores(logits, SamplingParams(temperature=ranking.temperature))
        return [
            race_best(row, ranking.count, ranking.noise, Stream.DRAFT, position)
            for row, position in zip(scores, ranking.positions, strict=True)
        ]
