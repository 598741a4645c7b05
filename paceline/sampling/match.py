"""A place in some text where a sequence's last tokens stood before, and what followed them there. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.protocol.proposal import NGRAM

LONGEST_MATCH = 64
"""Agreeing tokens are counted up to here."""
MAX_FOLLOWING = 129
"""Tokens after a match that are kept of it: a proposal's longest path, the token behind it, and as long a path again,
which is prefetched behind that one."""
ONCE = 2 / 3
"""Share of a token that was the only one to follow, once: a new one is half as likely (`suffix_kernels.ESCAPE`)."""
HALF_TRUSTED = 4.0
"""Agreeing tokens of a match that is worth half of what the longest is."""


@dataclass(frozen=True)
class Match:
    """A string that a sequence ends with and that stood elsewhere, too.

    Attributes:
        length: tokens of it; of a match in a prediction: of an earlier place that is as trustworthy.
        following: what followed it, at least one token.
        shares: how often each of them did, of all times that the string went on; a missing one is `ONCE`.
        drafter: under whose name its tokens are proposed.
    """

    length: int
    following: tuple[int, ...] = field(repr=False)
    shares: tuple[float, ...] = field(default=(), repr=False)
    drafter: str = NGRAM

    def continuation(self, k: int) -> tuple[int, ...]:
        """The next k tokens, or as many as there are."""
        return self.following[:k]

    def score(self, right: int = 0) -> float:
        """How far the token behind `right` others is to be trusted if they are right, in [0, 1): not yet a chance.

        It is the token's share times what the length of the match is worth, to which tokens that were right count.
        """
        length = self.length + right
        share = self.shares[right] if right < len(self.shares) else ONCE
        return share * length / (length + HALF_TRUSTED)

    def behind(self, right: int) -> Match | None:
        """The match when so many of its tokens have come; None: it ends there."""
        following = self.following[right:]
        return Match(self.length + right, following, self.shares[right:], self.drafter) if following else None
