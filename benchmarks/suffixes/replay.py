"""Replaying a known text: what each round would have proposed, and how much of it the text goes on with. Pure.

A round proposes as many tokens of the best match as are worth their rows, by chances that are learned on the way, as
the coordinator does (`coordinator.policy.market`); the text's own next token follows what was right.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.suffixes.ngram_lookup import NgramLookup
from coordinator.policy.matches import Matches
from coordinator.policy.ngram_shadow import PRIOR_WEIGHT, NgramShadow
from coordinator.text.library import EVERY_TENANT, Library
from paceline.sampling.match import Match

ROW = 0.03
"""Steps that a row more takes: about what it does on a CPU."""
PRICE = 0.04
"""Tokens that a row costs: a row's time at 4 tokens in 3 steps."""
MOST_PROPOSED = 32
SHARED_BYTES = 64 << 20


@dataclass(frozen=True)
class ReplayText:
    """A text whose end is replayed."""

    name: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


class MatchSource(Protocol):
    """Where matches come from, for one text after the other."""

    def begin(self, prompt: Sequence[int]) -> None:
        """Of a new text."""

    def extend(self, tokens: Sequence[int]) -> Match | None:
        """Take in committed tokens; the match that stands then."""

    def end(self) -> None:
        """The text has finished."""


class NgramSource:
    """n-gram look-ups in the text itself."""

    def begin(self, prompt: Sequence[int]) -> None:
        """Of a new text."""
        self._text = NgramLookup(prompt)

    def extend(self, tokens: Sequence[int]) -> Match | None:
        """Take in committed tokens; the match that stands then."""
        self._text.extend(tokens)
        return self._text.match()

    def end(self) -> None:
        """Nothing is kept."""


class SuffixSource:
    """The coordinator's matches; `shares`: the texts before are kept as one tenant's."""

    def __init__(self, *, shares: bool = False) -> None:
        self._library = Library(sharing=(EVERY_TENANT,) if shares else (), max_bytes=SHARED_BYTES)

    def begin(self, prompt: Sequence[int]) -> None:
        """Of a new text."""
        self._ids, self._prompt_tokens = [*prompt], len(prompt)
        self._matches = Matches(len(prompt), (), ngrams=True, volumes=lambda: self._library.volumes(""))

    def extend(self, tokens: Sequence[int]) -> Match | None:
        """Take in committed tokens; the match that stands then."""
        self._ids += tokens
        self._matches.extend(self._ids)
        return self._matches.best

    def end(self) -> None:
        """Keep the answer."""
        self._library.keep("", self._ids[self._prompt_tokens :])


SOURCES: dict[str, Callable[[], MatchSource]] = {
    "n-gram": NgramSource,
    "suffix": SuffixSource,
    "suffix+shared": lambda: SuffixSource(shares=True),
}


@dataclass(frozen=True)
class Replayed:
    """One text by one source; `us`: of this thread on its core, extending and finding, a token of the answer."""

    name: str
    source: str
    tokens: int
    rounds: int
    proposed: int
    accepted: int
    us: float

    @property
    def steps(self) -> float:
        """Time a token, a step of one row being 1."""
        return (self.rounds + ROW * self.proposed) / self.tokens


def replay(texts: Sequence[ReplayText], source: str) -> list[Replayed]:
    """All texts of a kind, in order: chances are learned from one to the next, as by a coordinator."""
    made, shadow = SOURCES[source](), NgramShadow()
    found = []
    for text in texts:
        found.append(_replay_one(text, source, made, shadow))
        made.end()
    return found


def _replay_one(text: ReplayText, name: str, source: MatchSource, shadow: NgramShadow) -> Replayed:
    own = shadow.child(PRIOR_WEIGHT)
    source.begin(text.prompt)
    match, at, spent_s = source.extend(()), 0, 0.0
    rounds = proposed = accepted = 0
    while at < len(text.answer):
        guess = match.continuation(worth(own, match)) if match else ()
        rest = text.answer[at:]
        right = agreement(guess, rest)
        tokens = rest[: right + 1]
        rounds, proposed, accepted = rounds + 1, proposed + len(guess), accepted + right
        for each in (shadow, own):
            each.learn(match, tokens)
        begun = time.thread_time()
        match = source.extend(tokens)
        spent_s += time.thread_time() - begun
        at += len(tokens)
    return Replayed(text.name, name, len(text.answer), rounds, proposed, accepted, 1e6 * spent_s / len(text.answer))


def worth(shadow: NgramShadow, match: Match) -> int:
    """Tokens of a match that are worth their rows together."""
    values = itertools.accumulate(chance - PRICE for chance in shadow.reached(match, MOST_PROPOSED))
    nodes, value = max(enumerate(values, 1), key=lambda each: each[1], default=(0, 0.0))
    return nodes if value > 0 else 0


def agreement(guess: Sequence[int], text: Sequence[int]) -> int:
    """Tokens at the beginning that are the same."""
    same = (a == b for a, b in zip(guess, text, strict=False))
    return sum(1 for _ in itertools.takewhile(bool, same))
