"""A place in some text where a sequence's last tokens occurred before, and the tokens that followed them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.protocol.proposal import NGRAM

LONGEST_MATCH = 64
"""Agreeing tokens are counted up to here."""
MAX_FOLLOWING = 129
"""Most tokens of a continuation: a proposal's longest path, the token behind it, and as long a path again,
which is prefetched behind that one."""
ONCE_SHARE = 2 / 3
"""Share of a token that has followed once, and no other: a new one is half as likely (`suffix_kernels.ESCAPE`)."""
HALF_TRUSTED = 4.0
"""Agreeing tokens of a match that counts half as much as the longest."""


@dataclass(frozen=True)
class Match:
    """A string that ends a sequence and also occurs elsewhere.

    Attributes:
        length: its tokens; for a match in a prediction, the length of an n-gram match that is as trustworthy.
        following: the tokens that followed it, at least one.
        shares: how often each of them did, of all times that the string went on; a missing one is `ONCE_SHARE`.
        drafter: the name under which its tokens are proposed.
    """

    length: int
    following: tuple[int, ...] = field(repr=False)
    shares: tuple[float, ...] = field(default=(), repr=False)
    drafter: str = NGRAM

    def continuation(self, k: int) -> tuple[int, ...]:
        """The next k tokens, or as many as there are."""
        return self.following[:k]

    def score(self, right: int = 0) -> float:
        """The trustworthiness of the token after `right` correct ones is, in [0, 1): a score, not a probability.

        It is the token's share times a factor that grows with the length of the match, correct tokens included.
        """
        length = self.length + right
        share = self.shares[right] if right < len(self.shares) else ONCE_SHARE
        return share * length / (length + HALF_TRUSTED)

    def advance(self, right: int) -> Match | None:
        """The match after `right` of its tokens have come true; None: it ends there."""
        following = self.following[right:]
        return Match(self.length + right, following, self.shares[right:], self.drafter) if following else None
