"""The one bound on being wrong: a request's account of time against target-only. Pure.

Rows of a request delay all that share its steps. Each account holds what the others' rows have cost it, too, and no
rows are taken that the poorest of them can't bear: that is what keeps every request near target-only where some gain
and others can't.
"""

from __future__ import annotations

from math import inf

ALLOWED_SHARE = 0.03
"""Most of a request's time that drafting may cost beyond target-only: what users are promised at worst."""
ALLOWED_TOKENS = (2.0, 4.0)
"""Target-only tokens that it may cost in any case, since nothing can be tried for less than a round or two; and what
may be lost early, on the credit of the share of tokens that are still to come: 4 are the share of a text of 128."""


class Account:
    """What drafting has cost so far, in milliseconds; below 0 it has gained.

    Target-only's time for what was written is known: that of the steps that ran, with one row of this request.
    A gain is banked up to what may be lost: more would only pay for a drafter that has turned useless.
    """

    def __init__(self) -> None:
        self.over_ms = 0.0
        self._elapsed_ms = 0.0
        self._token_ms = 0.0
        self._room = 0
        self._gain_ms = self._total_ms = 0.0
        self.ledger = Ledger()
        self.charged_ms = self.pledged_ms = 0.0

    @property
    def limit_ms(self) -> float:
        """Most that it may be."""
        return max(self._floor_ms, ALLOWED_SHARE * self._elapsed_ms)

    @property
    def left_ms(self) -> float:
        """What may still be lost."""
        return self.limit_ms - self.over_ms

    @property
    def bears_ms(self) -> float:
        """Delay by others that the request can bear: all that it may lose in its whole time, and is expected to gain."""
        if not self._token_ms:
            return inf  # it has planned nothing yet
        whole_ms = self._elapsed_ms + self._room * self._token_ms
        return ALLOWED_SHARE * whole_ms + self._room * max(0.0, self._gain_ms) - self._total_ms

    def expect(self, room: int, token_ms: float, gain_ms: float) -> None:
        """So many tokens may still come; a target-only one would take so long now, and drafting gains so much."""
        self._room, self._token_ms, self._gain_ms = room, token_ms, gain_ms

    def add(self, round_ms: float, committed: int, token_ms: float) -> None:
        """Count a round that drafted, or was sent in order to.

        `token_ms` is what a target-only token would have taken in its step.
        """
        self.pass_by(round_ms, token_ms)
        self._total_ms += round_ms - committed * token_ms
        self.over_ms = max(self.over_ms + round_ms - committed * token_ms, -self.limit_ms)

    def pass_by(self, round_ms: float, token_ms: float, others_ms: float = 0.0) -> None:
        """Count a round that drafted nothing: it owes to drafting what others have delayed it by."""
        self.over_ms += others_ms
        self._total_ms += others_ms
        self._elapsed_ms += round_ms
        self._token_ms = token_ms

    def rounds_until(self, cost_ms: float) -> int:
        """Target-only rounds before so much may be lost again; 0: now."""
        missing = self.over_ms + cost_ms - self.limit_ms
        if missing <= 0 or not self._token_ms:
            return 0
        floor_ms = max(0.0, self._floor_ms - ALLOWED_SHARE * self._elapsed_ms)
        return int((missing + floor_ms) / (ALLOWED_SHARE * self._token_ms)) + 1

    @property
    def _floor_ms(self) -> float:
        least, most = (tokens * self._token_ms for tokens in ALLOWED_TOKENS)
        return max(least, min(most, ALLOWED_SHARE * (self._elapsed_ms + self._room * self._token_ms)))


class Ledger:
    """The accounts of the requests that share a target."""

    def __init__(self) -> None:
        self._accounts: set[Account] = set()
        self._charged_ms = self._pledged_ms = 0.0
        """What each has lost by rows of others since the start, and may lose by those that are under way."""
        self._poorest_ms = inf
        self._read = 0

    def __len__(self) -> int:
        return len(self._accounts)

    def join(self, account: Account) -> None:
        """Its request runs here from now on."""
        account.ledger.leave(account)
        account.ledger, account.charged_ms = self, self._charged_ms
        self._accounts.add(account)
        self._read = 0

    def leave(self, account: Account) -> None:
        """Its request runs here no longer."""
        if account in self._accounts:
            self.pledge(account, 0.0)
            self._accounts.remove(account)
            self._read = 0

    def pledge(self, account: Account, ms: float) -> None:
        """A round is under way whose rows delay the others so much."""
        self._pledged_ms += ms - account.pledged_ms
        account.pledged_ms = ms

    def settle(self, account: Account, ms: float) -> float:
        """A round has delayed the others so much; returns by how much others have delayed this one meanwhile."""
        self.pledge(account, 0.0)
        others_ms = self._charged_ms - account.charged_ms
        self._charged_ms += ms
        account.charged_ms = self._charged_ms
        return others_ms

    def bearable_ms(self, account: Account) -> float:
        """Delay that all others can bear. The poorest is looked for once in as many calls as there are accounts."""
        if len(self._accounts) <= 1:
            return inf
        if self._read <= 0:
            self._read = len(self._accounts)
            self._poorest_ms = self._charged_ms + min(
                each.bears_ms - self._charged_ms + each.charged_ms for each in self._accounts
            )
        self._read -= 1
        return self._poorest_ms - self._charged_ms - self._pledged_ms
