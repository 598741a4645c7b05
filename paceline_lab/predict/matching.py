"""Matches in the text so far as a drafter: the proposals that the coordinator's suffix automaton would have made."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from paceline.sampling.match import Match
from paceline.sampling.suffix import SuffixAutomaton
from paceline_lab.predict.figures import LEAST_Q, RANKS, Chances
from paceline_lab.predict.passes import SampleText
from paceline_lab.predict.positions import ABSENT, DrafterPositions, TargetPositions

MATCH_DEPTHS = 32
"""Tokens of a match that are followed; a longer proposal is right to its end only in copied passages."""


def match_positions(
    text: SampleText, target: TargetPositions, p_of: Callable[[int], Chances] | None
) -> DrafterPositions:
    """Find the match before each position, and how far the target's draws go on with it.

    A match is certain of its one continuation: q is 1 there. Where there is none, `offered` and all figures are 0.

    Args:
        text: the text, which is searched up to each position.
        target: the target's positions in it.
        p_of: returns the target's distribution at a position, as figures have it; None: it is not known, and figures
            that need it are absent.
    """
    count = target.places.size
    reach = np.zeros((count, MATCH_DEPTHS, RANKS))
    lengths, ranks = np.zeros((2, count), np.int32)
    choices = np.full(count, -1, np.int32)
    figures = np.zeros((5, count))
    for place, match in enumerate(_matches(text.row.token_ids, target.places)):
        if match is None:
            continue
        following = np.array(match.continuation(MATCH_DEPTHS), np.int32)
        draws = target.tokens[place : place + following.size]
        right = following[: draws.size] == draws
        depths = np.arange(right.size)
        reach[place + depths, depths] = right[:, None]
        guess = int(following[0])
        lengths[place], ranks[place], choices[place] = following.size, right[0], guess
        agreement = (ABSENT, ABSENT) if p_of is None else _agreement(p_of(place), guess)
        figures[:, place] = match.score(), right[0], *agreement, 0.0
    return DrafterPositions(reach, lengths, ranks, choices, choices.copy(), *figures)


def _agreement(p: Chances, guess: int) -> tuple[float, float]:
    """Return overlap and KL of a distribution with a certain guess."""
    positive = p[p > 0]
    return float(p[guess]), float((positive * np.log(positive)).sum() - (1 - p[guess]) * np.log(LEAST_Q))


def _matches(tokens: NDArray[np.int32], places: NDArray[np.int32]) -> list[Match | None]:
    """Return the best match of the text before each place."""
    matches: list[Match | None] = []
    automaton = SuffixAutomaton()
    for place in places:
        automaton.extend(tuple(tokens[len(automaton) : place].tolist()))
        matches.append(automaton.match(automaton.own_suffix()))
    return matches
