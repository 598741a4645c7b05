"""What a coordinator learned of drafters, of matches and of outcome drafting; for all requests, and for one. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, takewhile
from operator import mul

from coordinator.policy.plan import Source
from paceline.costs.acceptance import BINS, HALF, PRIOR_CHANCE, SUREST, TokenAcceptance, bin_of, binned_chances
from paceline.costs.running_mean import RunningMean
from paceline.costs.service_costs import LEAST_MOVE
from paceline.protocol.draft import Shadow
from paceline.protocol.proposal import Acceptance, Proposal
from paceline.protocol.records import RoundRecord
from paceline.sampling.match import ONCE_SHARE, Match

DOUBT_POWER = 1.75
"""Of the doubt in a score. It fits 14 kinds of prompts (docs/reports/reliability-2026-11-26.md)."""
SHADOW_SHARE = LEAST_MOVE / 2
"""Largest share of time that drafts work for shadows alone. No loss budget counts it: it is less than one allows."""


def _prior_of_match(score: float) -> float:
    """Chance of a token before anything is known, at the middle of the bin that begins at a score."""
    doubt = max(0.0, 1 - (score + HALF / BINS) / ONCE_SHARE)
    return min(SUREST, 1 - float(doubt**DOUBT_POWER))


@dataclass
class NgramShadow:
    """How often the next token of a match is right, by drafter and by the match's score; proposed or not.

    A deeper token of a match counts as the next token of a match that is longer by the right tokens before it. So
    text that comes token by token tells as much about deep tokens as text of whole proposals. A match depends on
    committed tokens alone, so every acceptance rule may use these statistics (`exactness` §7). `rightness`: how often
    a text's matches were right of late. It moves a score by up to half a bin, since copies go on as copies.
    """

    by_drafter: dict[str, list[RunningMean]] = field(default_factory=dict)
    rightness: RunningMean = field(default_factory=lambda: RunningMean(HALF))

    def learn(self, match: Match | None, committed: Sequence[int], *pools: NgramShadow) -> None:
        """Update from the tokens committed after a match, and pools with it; None: there was no match."""
        if match is None:
            return
        for right, (guess, token) in enumerate(zip(match.following, committed, strict=False)):
            place = self._bin_of(match, right)
            for shadow in (self, *pools):
                shadow._of(match.drafter)[place].add(float(guess == token))
            self.rightness.add(float(guess == token))
            if guess != token:
                return

    def prefix_chances(self, match: Match, depth: int, least: float = 0.0) -> list[float]:
        """Chances that a match's first 1, 2, … tokens, at most `depth`, are all right, down to `least`."""
        chances, depths = self._of(match.drafter), range(min(depth, len(match.following)))
        all_right = accumulate((chances[self._bin_of(match, right)].value for right in depths), mul)
        return [*takewhile(lambda chance: chance >= least, all_right)]

    def child(self) -> NgramShadow:
        """The chances that one request begins with."""
        return NgramShadow({drafter: [mean.child() for mean in means] for drafter, means in self.by_drafter.items()})

    def _bin_of(self, match: Match, right: int) -> int:
        return bin_of(max(0.0, match.score(right) + (self.rightness.value - HALF) / BINS))

    def _of(self, drafter: str) -> list[RunningMean]:
        if drafter not in self.by_drafter:
            self.by_drafter[drafter] = binned_chances(_prior_of_match)
        return self.by_drafter[drafter]


@dataclass
class TextStats:
    """Statistics of texts, which all drafters share.

    Attributes:
        ngrams: how often n-gram matches are right.
        match_value: net worth of a round's n-gram match in tokens; 0 for rounds without one.
        shadow_ms: time for which drafts of all requests may still work for shadows alone.
    """

    ngrams: NgramShadow = field(default_factory=NgramShadow)
    match_value: RunningMean = field(default_factory=lambda: RunningMean(0.0))
    shadow_ms: float = 0.0

    def child(self) -> TextStats:
        """The copy that one request begins with."""
        return TextStats(self.ngrams.child(), self.match_value.child())


@dataclass
class AcceptanceStats:
    """Statistics of one drafter and of texts, for greedy or for sampled texts.

    Attributes:
        tokens: how often the drafter's tokens are, or would have been, accepted.
        texts: statistics that do not depend on the drafter.
        hits: share of rounds with outcome drafting whose outcome had a proposal, by load; True: at the target.
    """

    tokens: TokenAcceptance = field(default_factory=TokenAcceptance)
    texts: TextStats = field(default_factory=TextStats)
    hits: dict[tuple[int, bool], RunningMean] = field(
        default_factory=lambda: defaultdict(lambda: RunningMean(PRIOR_CHANCE))
    )

    def child(self) -> AcceptanceStats:
        """The copy that one request begins with."""
        hits = self.hits | {key: mean.child() for key, mean in self.hits.items()}
        return AcceptanceStats(self.tokens.child(), self.texts.child(), hits)


class RequestStats:
    """The statistics of one request, by drafter, and those of all requests, which they begin with.

    Args:
        pool_of: the statistics of all requests, by drafter.
        drafter: the key of the drafter to begin with.
        rule, greedy: of acceptance, of which only the coupled one tells ranks apart; whether texts are greedy.
    """

    def __init__(
        self, pool_of: Callable[[str], AcceptanceStats], drafter: str, rule: Acceptance, *, greedy: bool
    ) -> None:
        self._pool_of = pool_of
        self._drafter = drafter
        self._by_drafter = {drafter: pool_of(drafter).child()}
        self.is_coupled = rule is Acceptance.COUPLED
        self._greedy = greedy
        self._run = self._shadow_end = 0  # latest positions in a row with the draft's first choice, and their end
        self.reads_features = False
        """Whether the drafter reads the target's hidden states. The shadow of committed tokens, which have its
        features, then tells nothing of depths drafted on the drafter's own."""

    @property
    def own(self) -> AcceptanceStats:
        """The request's own, of the drafter at work."""
        return self._by_drafter[self._drafter]

    @property
    def pool(self) -> AcceptanceStats:
        """Those of all requests, of the drafter at work."""
        return self._pool_of(self._drafter)

    @property
    def both(self) -> tuple[AcceptanceStats, AcceptanceStats]:
        """The request's own and those of all requests; what is learned goes into both."""
        return self.own, self.pool

    def optimistic(self, drafter: str) -> AcceptanceStats:
        """An upper bound of a drafter's statistics, the request's own or all requests'; tries lower it."""
        pool = self._pool_of(drafter)
        stats = self._by_drafter.get(drafter, pool)
        return replace(stats, tokens=stats.tokens.upper_bound(pool.tokens.positions))

    def change(self, drafter: str) -> None:
        """Use another drafter from now on. The statistics of texts stay."""
        texts, pool = self.own.texts, self._pool_of(drafter)
        pool.texts = self.pool.texts
        self._drafter, self._run, self._shadow_end = drafter, 0, 0
        self._by_drafter.setdefault(drafter, pool.child()).texts = texts

    def take_shadow(self, shadow: Shadow) -> None:
        """Update from the shadow of committed tokens, proposed or not."""
        if shadow.first_position != self._shadow_end:
            self._run = 0
        self._shadow_end = shadow.end
        for rank, q in zip(shadow.ranks, shadow.probabilities, strict=True):
            for stats in self.both:
                if self.is_coupled:
                    stats.tokens.take_rank(rank, q, self._run)
                else:
                    # Greedy acceptance is certain; for sampled texts q is a lower bound of it (Σ pq).
                    stats.tokens.take_average(float(rank == 1) if self._greedy else q)
            self._run = self._run + 1 if rank == 1 and not self.reads_features else 0

    def take_match(self, match: Match | None, committed: Sequence[int]) -> None:
        """Update from the tokens committed after a match, proposed or not."""
        self.own.texts.ngrams.learn(match, committed, self.pool.texts.ngrams)

    def take_round(self, source: Source, record: RoundRecord, proposal: Proposal | None, path: Sequence[int]) -> None:
        """Update from a round whose proposal, if there was one, came from `source`; `path` has the accepted nodes."""
        learns_depths = source is not Source.NGRAM and (self.reads_features or not self.is_coupled)
        self.pool.texts.shadow_ms += SHADOW_SHARE * record.round_ms
        if proposal is not None and learns_depths:
            for stats in self.both:
                stats.tokens.take_proposal(proposal, path, first=1 if self.is_coupled else 0)
