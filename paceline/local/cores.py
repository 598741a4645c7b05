"""How a machine's cores are divided between a target and its draft, by what their steps take. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.costs.cost_line import CostLine
from paceline.protocol.errors import require

PRIOR_ACCEPTANCE = 0.7
"""Assumed of every depth before any text is seen: drafts of a family measured .65 (prose) to .94 (code)."""
PRIOR_HITS = 0.8
"""Assumed share of rounds whose outcome was drafted for: a pair of one family with cores of their own had .88."""
LONGEST_CHAIN = 8
"""Most tokens that a round is weighed with: at the prior a ninth is accepted once in 25 rounds."""
ALIKE = 1.05
"""Two measurements differ by so much where others use the machine too: what gains less decides nothing."""
_CORES_LIMIT = "target=N or target=N,draft=M"
_CORES = re.compile(r"target=(?P<target>\d{1,4})(,draft=(?P<draft>\d{1,4}))?")


@dataclass(frozen=True)
class Cores:
    """Compute threads of the two services that compute; draft 0: there is none."""

    target: int
    draft: int

    @classmethod
    def parse(cls, text: str) -> Cores:
        """Read `target=N` or `target=N,draft=M`.

        Raises:
            InvalidInput: neither.
        """
        match = _CORES.fullmatch(text)
        require(match is not None, "cores", text, _CORES_LIMIT)
        assert match is not None, "required"
        return cls(int(match["target"]), int(match["draft"] or 0))

    def check(self, total: int, *, drafts: bool) -> None:
        """Refuse what the machine or the services don't have.

        Raises:
            InvalidInput: naming the service.
        """
        require(1 <= self.target <= total, "cores target", self.target, f"in [1, {total}], the cores of this process")
        if drafts:
            require(
                1 <= self.draft <= total, "cores draft", self.draft, f"in [1, {total}], the cores of this process"
            )
        else:
            require(self.draft == 0, "cores draft", self.draft, "left out: there is no draft service")

    def says(self, total: int) -> str:
        """The division in words."""
        if not self.draft:
            return f"target {self.target}"
        return (
            f"target {self.target} + draft {self.draft} {'shared' if self.target + self.draft > total else 'apart'}"
        )


@dataclass(frozen=True)
class MeasuredDivision:
    """What steps take with cores divided so.

    Attributes:
        target: a target's step by rows, alone.
        draft: a draft's step by rows, alone.
        target_slowdown: how much longer the target's takes while the draft works, at least 1.
        draft_slowdown: how much longer the draft's takes meanwhile, at least 1.
    """

    cores: Cores
    target: CostLine
    draft: CostLine
    target_slowdown: float = 1.0
    draft_slowdown: float = 1.0


@dataclass(frozen=True)
class Worth:
    """What one request gets, at the priors: tokens a second, and how its tokens are drafted."""

    tokens_per_s: float
    how: str


def candidates(total: int) -> tuple[Cores, ...]:
    """Divisions to measure: the target on all cores, then with cores kept for the draft, which has 1, 2, 4 …

    A draft of its own cores gets no more than the target. Powers of two: a draft's step gains too little from each
    thread more for the numbers between to matter.
    """
    counts = [1 << power for power in range(total.bit_length())]
    shared = tuple(Cores(total, draft) for draft in counts)
    return shared + tuple(Cores(total - draft, draft) for draft in counts if draft <= total - draft)


def by_rule(total: int, *, drafts: bool) -> Cores:
    """The division where nothing was measured: the target loses nothing, and the draft computes while it waits."""
    return Cores(total, 1 if drafts else 0)


def weigh(measured: MeasuredDivision) -> Worth:
    """The most that one request gets from a division: target-only, drafts waited for, or drafted ahead."""
    best = Worth(1000 / measured.target.ms(1), "target-only")
    for tokens in range(1, LONGEST_CHAIN + 1):
        committed = sum(PRIOR_ACCEPTANCE**depth for depth in range(tokens + 1))
        for ms, how in ((_waited_ms(measured, tokens), "waited for"), (_ahead_ms(measured, tokens), "drafted ahead")):
            if 1000 * committed / ms > best.tokens_per_s:
                best = Worth(1000 * committed / ms, f"{tokens} tokens {how}")
    return best


def _waited_ms(measured: MeasuredDivision, tokens: int) -> float:
    """A round whose proposal is drafted just in time: one after the other, neither disturbs the other."""
    return tokens * measured.draft.ms(1) + measured.target.ms(tokens + 1)


def _ahead_ms(measured: MeasuredDivision, tokens: int) -> float:
    """A round beside which the next proposal is drafted; without a hit, that is waited for."""
    drafting = tokens * measured.draft.ms(OUTCOME_ROWS) * measured.draft_slowdown
    alone = measured.target.ms(tokens + 1)
    # While the draft works, 1 / slowdown of the target's step is done in the time of a whole one.
    verifying = min(alone * measured.target_slowdown, alone + drafting * (1 - 1 / measured.target_slowdown))
    missed = verifying + tokens * measured.draft.ms(1)
    return PRIOR_HITS * max(verifying, drafting) + (1 - PRIOR_HITS) * missed


OUTCOME_ROWS = 4
"""Rows of a draft's step that drafts for outcomes: as many next tokens as the coordinator asks for by default."""


def choose(measured: Sequence[MeasuredDivision]) -> MeasuredDivision:
    """The first division that is worth as much as the best; those before it leave the target more.

    A division whose target alone is slower than on all cores is none: requests that nobody can draft for would pay.
    """
    fastest_ms = min(each.target.ms(1) for each in measured)
    harmless = [each for each in measured if each.target.ms(1) <= fastest_ms * ALIKE]
    most = max(weigh(each).tokens_per_s for each in harmless)
    return next(each for each in harmless if weigh(each).tokens_per_s * ALIKE >= most)


def explain(measured: Sequence[MeasuredDivision], chosen: MeasuredDivision, total: int) -> list[str]:
    """A line for each division, with what it is worth and what its steps take, then the chosen one."""
    lines = [f"{_row(each, total)}" for each in measured]
    prior = f"at {PRIOR_ACCEPTANCE:.0%} accepted at each depth, {PRIOR_HITS:.0%} hits"
    return [*lines, f"chosen: {chosen.cores.says(total)} ({prior})"]


def _row(each: MeasuredDivision, total: int) -> str:
    worth = weigh(each)
    steps = f"target step {each.target.ms(1):.3g} ms, of 5 rows {each.target.ms(5):.3g}; draft step"
    steps += f" {each.draft.ms(1):.3g} ms, of 4 rows {each.draft.ms(OUTCOME_ROWS):.3g}"
    both = f"together x{each.target_slowdown:.2f} and x{each.draft_slowdown:.2f}"
    return f"{each.cores.says(total)}: {worth.tokens_per_s:.3g} tokens/s ({worth.how}; {steps}; {both})"
