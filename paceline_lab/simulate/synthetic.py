"""Traces that were never measured: pairs from hopeless to perfect, by seed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from paceline.protocol.errors import require
from paceline_lab.simulate.trace import TracedRequest

MOST_RANKED = 16
"""Ranks that a draft tells apart; a token beyond them has rank 0."""
HALVED = 0.5
"""Behind the first choice the chance of a rank is so many times that of the one before it."""
SHORTEST_SOURCE = 8
"""Tokens behind a copy's source when it begins, at least."""
SURENESS = 6.0
"""Weight of a stretch's acceptance in a position's own: a Beta's two parameters sum up to it."""


@dataclass(frozen=True)
class SyntheticPair:
    """How often a draft is right: a chain between easy and hard stretches, and texts that are easier than others.

    Attributes:
        easy, hard: acceptance in either kind of stretch; 0 and 1 are certain.
        stretch: mean length of a stretch, tokens.
        easy_share: of the text.
        spread: standard deviation of a request's own ease, on the scale of log-odds.
        copied_share: of the text that stands in n-gram matches which go on; `copy_length`: their mean length.
        false_matches: share of the other positions with a short match that is wrong.
    """

    easy: float
    hard: float
    stretch: float = 12.0
    easy_share: float = 0.5
    spread: float = 0.3
    copied_share: float = 0.0
    copy_length: float = 16.0
    false_matches: float = 0.2

    def __post_init__(self) -> None:
        for name in ("easy", "hard", "easy_share", "copied_share", "false_matches"):
            require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "in [0, 1]")
        for name in ("stretch", "copy_length"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")

    @classmethod
    def even(cls, acceptance: float) -> SyntheticPair:
        """The same acceptance at every position of every request."""
        return cls(acceptance, acceptance, spread=0.0)


PAIRS = {
    "hopeless": SyntheticPair(0.06, 0.02),
    "poor": SyntheticPair(0.35, 0.15),
    "middling": SyntheticPair(0.75, 0.45),
    "good": SyntheticPair(0.92, 0.7),
    "perfect": SyntheticPair.even(1.0),
    "mixed": SyntheticPair(0.95, 0.1, stretch=24),
    "copies": SyntheticPair(0.5, 0.3, copied_share=0.5, copy_length=24),
}


def synthetic_requests(
    pair: SyntheticPair, count: int, tokens: int, *, seed: int = 0, apart_ms: float = 0.0, prompt_tokens: int = 8
) -> tuple[TracedRequest, ...]:
    """So many requests, `apart_ms` between their arrivals; the same for the same seed. No two have a token alike."""
    ids = tokens + prompt_tokens
    texts = (_request(pair, tokens, np.random.default_rng((seed, n)), n * ids, prompt_tokens) for n in range(count))
    return tuple(replace(each, arrival_ms=number * apart_ms) for number, each in enumerate(texts))


def _request(
    pair: SyntheticPair, tokens: int, random: np.random.Generator, first_id: int, prompt_tokens: int
) -> TracedRequest:
    chances = _chances(pair, tokens, random)
    right = random.random(tokens) < chances
    ranks = np.where(right, 1, 1 + random.geometric(1 - HALVED, tokens))
    ranks[ranks > MOST_RANKED] = 0
    return TracedRequest(
        prompt=tuple(range(first_id, first_id + prompt_tokens)),
        answer=tuple(_text(pair, tokens, first_id + prompt_tokens, random)),
        ranks=tuple(ranks.tolist()),
        chances=tuple(chances.tolist()),
    )


def _chances(pair: SyntheticPair, tokens: int, random: np.random.Generator) -> np.ndarray:
    """The draft's probability of its first choice at each position, which is the chance that it is right."""
    easy = _chain(tokens, pair.stretch, pair.easy_share, random)
    means = np.where(easy, pair.easy, pair.hard)
    certain = (means <= 0) | (means >= 1)
    if not pair.spread or certain.all():
        return means.astype(float)
    inner = np.clip(means, 1e-3, 1 - 1e-3)
    odds = np.log(inner / (1 - inner)) + random.normal(0.0, pair.spread)
    own = np.clip(1 / (1 + np.exp(-odds)), 1e-3, 1 - 1e-3)
    return np.where(certain, means, random.beta(SURENESS * own, SURENESS * (1 - own)))


def _chain(tokens: int, stretch: float, share: float, random: np.random.Generator) -> np.ndarray:
    """Stretches of true and false, geometric in length, `share` of all true."""
    if share in (0.0, 1.0):
        return np.full(tokens, share == 1.0)
    stretches: list[bool] = []
    inside = bool(random.random() < share)
    while len(stretches) < tokens:
        mean = 2 * stretch * (share if inside else 1 - share)
        stretches += [inside] * int(random.geometric(min(1.0, 1 / max(1.0, mean))))
        inside = not inside
    return np.array(stretches[:tokens])


def _text(pair: SyntheticPair, tokens: int, first_id: int, random: np.random.Generator) -> list[int]:
    """A text of new tokens, with stretches of itself in it, and with short ones that go on otherwise."""
    if not pair.copied_share:
        return [*range(first_id, first_id + tokens)]
    copied = _chain(tokens, pair.copy_length, pair.copied_share, random)
    misleading = random.random(tokens) < pair.false_matches
    text: list[int] = []
    source = rest = 0
    for place in range(tokens):
        if not rest and place > SHORTEST_SOURCE:
            run = int(np.argmin(copied[place:])) if not copied[place:].all() else tokens - place
            rest = run or (int(random.integers(2, 5)) if misleading[place] else 0)
            source = int(random.integers(place - SHORTEST_SOURCE + 1)) if rest else 0
        if rest:
            text.append(text[source])
            source, rest = source + 1, rest - 1
        else:
            text.append(first_id + place)
    return text
