"""What a coordinator learned of drafters, of matches and of outcome drafting; for all requests, and for one. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from coordinator.policy.plan import Source
from coordinator.policy.round_times import OUTLIER
from paceline.costs.acceptance import PRIOR_CHANCE, AcceptanceTable, BinnedChances, prior_chance
from paceline.costs.running_mean import RunningMean
from paceline.protocol.proposal import Proposal
from paceline.protocol.records import RoundRecord
from paceline.sampling.match import ONCE_SHARE, Match


def _prior_of_match(score: float) -> float:
    """Chance of a token before anything is known: length / (length + 4) of what occurred once."""
    return min(prior_chance(1.0), score / ONCE_SHARE)


@dataclass
class NgramShadow:
    """How often the next token of a match is right, by drafter and by the match's score; proposed or not.

    A deeper token of a match counts as the next token of a match that is longer by the right tokens before it. So
    text that comes token by token tells as much about deep tokens as text of whole proposals. A match depends on
    committed tokens alone, so every acceptance rule may use these statistics (`exactness` §7).
    """

    by_drafter: dict[str, BinnedChances] = field(default_factory=dict)

    def learn(self, match: Match | None, committed: Sequence[int]) -> None:
        """Update the chances from the tokens committed after a match; None: there was no match."""
        for right, (guess, token) in enumerate(zip(match.following if match else (), committed, strict=False)):
            assert match is not None, "it has tokens"
            self._of(match.drafter).add(match.score(right), guess == token)
            if guess != token:
                return

    def prefix_chances(self, match: Match, depth: int) -> list[float]:
        """Chances that the match's first 1, 2, … tokens, up to `depth`, are all right."""
        chances = self._of(match.drafter)
        most = min(depth, len(match.following))
        return [*accumulate((chances.chance(match.score(right)) for right in range(most)), mul)]

    def child(self) -> NgramShadow:
        """The chances that one request begins with."""
        return NgramShadow({drafter: chances.child() for drafter, chances in self.by_drafter.items()})

    def _of(self, drafter: str) -> BinnedChances:
        if drafter not in self.by_drafter:
            self.by_drafter[drafter] = BinnedChances.of(_prior_of_match)
        return self.by_drafter[drafter]


@dataclass
class CopyStats:
    """Means over rounds whose proposal was copied from a match: tokens proposed and committed, and milliseconds."""

    proposed: RunningMean = field(default_factory=lambda: RunningMean(0.0, 0.0))
    tokens: RunningMean = field(default_factory=lambda: RunningMean(1.0, 0.0))
    ms: RunningMean = field(default_factory=lambda: RunningMean(0.0, 0.0))

    def take(self, record: RoundRecord) -> None:
        """Count a round; a pause of the machine counts as an outlier."""
        self.proposed.add(record.proposed)
        self.tokens.add(record.accepted + 1)
        self.ms.add(min(record.round_ms, OUTLIER * self.ms.value) if self.ms.weight else record.round_ms)

    def child(self) -> CopyStats:
        """The copy that one request begins with."""
        return CopyStats(self.proposed.child(), self.tokens.child(), self.ms.child())


@dataclass
class TextStats:
    """Statistics of texts, which all drafters share.

    Attributes:
        ngrams: how often n-gram matches are right.
        match_value: net worth of a round's n-gram match in tokens; 0 for rounds without one.
        copy_rounds: means over the rounds that proposed one.
        elapsed_ms, shadow_ms: the time of all requests, and that of drafts that worked for shadows alone.
    """

    ngrams: NgramShadow = field(default_factory=NgramShadow)
    match_value: RunningMean = field(default_factory=lambda: RunningMean(0.0))
    copy_rounds: CopyStats = field(default_factory=CopyStats)
    elapsed_ms: float = 0.0
    shadow_ms: float = 0.0

    def child(self) -> TextStats:
        """The copy that one request begins with."""
        return TextStats(self.ngrams.child(), self.match_value.child(), self.copy_rounds.child())

    def take_round(self, source: Source, record: RoundRecord) -> None:
        """Count a round whose proposal, if there was one, came from `source`."""
        if source is Source.NGRAM and record.proposed:
            self.copy_rounds.take(record)


@dataclass
class AcceptanceStats:
    """Statistics of one drafter and of texts, for greedy or for sampled texts.

    Attributes:
        tokens: how often the drafter's tokens are, or would have been, accepted.
        texts: statistics that do not depend on the drafter.
        hits: share of rounds with outcome drafting whose outcome had a proposal when it came.
        hit_length: tokens of such a proposal when its outcome came.
        pays: of the pool of all requests: whether drafting was the best strategy when the last request began.
    """

    tokens: AcceptanceTable = field(default_factory=AcceptanceTable)
    texts: TextStats = field(default_factory=TextStats)
    hits: RunningMean = field(default_factory=lambda: RunningMean(PRIOR_CHANCE))
    hit_length: RunningMean = field(default_factory=lambda: RunningMean(0.0, 0.0))
    pays: bool = True

    def child(self) -> AcceptanceStats:
        """The copy that one request begins with."""
        return AcceptanceStats(self.tokens.child(), self.texts.child(), self.hits.child(), self.hit_length.child())

    def take_ahead(self, proposal: Proposal | None) -> None:
        """Count a round with outcome drafting; `proposal` is that of its outcome, None: a miss."""
        self.hits.add(float(proposal is not None))
        if proposal is not None:
            self.hit_length.add(max(proposal.depths, default=0))
