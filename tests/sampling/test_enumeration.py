"""The acceptance rules, enumerated: every draft, every branch of the accept draws, V = 3, k <= 3.

p and q are random tables that depend on the whole prefix. The distribution of the first k + 1 tokens (the
round's own, then plain continuation) must be the target's within 1e-12. The accept draws are
integrated analytically: each rule is constant in u_i on both sides of one threshold, so every cell of
thresholds is weighted by its volume and the rule itself is asked on the cell's far corners.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

from paceline.protocol.proposal import Proposal
from paceline.sampling.acceptance import (
    Distribution,
    block_length,
    block_thresholds,
    block_weights,
    coupled_walk,
    recovered_distribution,
    rejection_length,
    residual,
)
from tests.sampling import plain
from tests.sampling.plain import Table

V = 3
Masses = dict[tuple[int, ...], float]
EXACT = 1e-12
KINDS = 6
"""Of pairs p and q."""


@dataclass(frozen=True)
class Branch:
    """One drafted chain: the k + 1 rows of p and the k rows of q along it."""

    x: tuple[int, ...]
    p_rows: list[Distribution]
    q_rows: list[Distribution]

    @property
    def p(self) -> list[float]:
        return [float(row[token]) for row, token in zip(self.p_rows, self.x, strict=False)]

    @property
    def q(self) -> list[float]:
        return [float(row[token]) for row, token in zip(self.q_rows, self.x, strict=True)]


Rule = Callable[[Branch], Iterator[tuple[float, int, Distribution]]]
"""For a drafted chain: (probability, accepted length, distribution of the token after) of each branch."""


def cells(thresholds: Sequence[float]) -> Iterator[tuple[float, list[tuple[float, ...]]]]:
    """Each cell of accept draws: its volume, and its lowest and highest corners."""
    for below in product([True, False], repeat=len(thresholds)):
        volume, low, high = 1.0, [], []
        for is_below, h in zip(below, thresholds, strict=True):
            volume *= h if is_below else 1 - h
            low.append(0.0 if is_below else h + (1 - h) * 1e-9)
            high.append(h * (1 - 1e-9) if is_below else 1 - 2.0**-53)
        if volume > 0:
            yield volume, [tuple(low), tuple(high)]


def by_rejection(branch: Branch) -> Iterator[tuple[float, int, Distribution]]:
    thresholds = [min(1.0, p / q) for p, q in zip(branch.p, branch.q, strict=True)]
    for volume, corners in cells(thresholds):
        lengths = {rejection_length(u, branch.p, branch.q) for u in corners}
        assert len(lengths) == 1
        accepted = lengths.pop()
        if accepted < len(branch.x):
            p, q = branch.p_rows[accepted], branch.q_rows[accepted]
            yield volume, accepted, recovered_distribution(residual(p, q), p)
        else:
            yield volume, accepted, branch.p_rows[-1]


def by_block(branch: Branch) -> Iterator[tuple[float, int, Distribution]]:
    weights = block_weights(branch.p, branch.q)
    left = [residual(p, q, w) for p, q, w in zip(branch.p_rows, branch.q_rows, weights, strict=False)]
    masses = [float(row.sum()) for row in left]
    for volume, corners in cells(block_thresholds(weights, masses)):
        lengths = {block_length(u, weights, masses) for u in corners}
        assert len(lengths) == 1
        accepted = lengths.pop()
        if accepted < len(branch.x):
            yield volume, accepted, recovered_distribution(left[accepted], branch.p_rows[accepted])
        else:
            yield volume, accepted, branch.p_rows[-1]


def branches(p: Table, q: Table, k: int) -> Iterator[tuple[float, Branch]]:
    """Every drafted chain with its probability."""
    for x in product(range(V), repeat=k):
        q_rows = [q[x[:i]] for i in range(k)]
        drafted = float(np.prod([row[token] for row, token in zip(q_rows, x, strict=True)]))
        if drafted > 0:
            yield drafted, Branch(x, [p[x[:i]] for i in range(k + 1)], q_rows)


def continued(masses: Masses, emitted: tuple[int, ...], mass: float, p: Table, length: int) -> None:
    """Add a round's tokens, continued plainly to `length` tokens."""
    if len(emitted) == length:
        masses[emitted] += mass
        return
    for token in range(V):
        continued(masses, (*emitted, token), mass * float(p[emitted][token]), p, length)


def speculative_distribution(rule: Rule, p: Table, q: Table, k: int) -> Masses:
    masses: Masses = defaultdict(float)
    for drafted, branch in branches(p, q, k):
        for volume, accepted, after in rule(branch):
            for token in np.flatnonzero(after):
                emitted = (*branch.x[:accepted], int(token))
                continued(masses, emitted, drafted * volume * float(after[token]), p, k + 1)
    return masses


def target_distribution(p: Table, length: int) -> Masses:
    masses: Masses = defaultdict(float)
    continued(masses, (), 1.0, p, length)
    return masses


def error(found: Masses, wanted: Masses) -> float:
    return max(abs(found.get(x, 0.0) - wanted.get(x, 0.0)) for x in found.keys() | wanted.keys())


def expected_length(rule: Rule, p: Table, q: Table, k: int) -> float:
    return sum(
        drafted * volume * accepted for drafted, branch in branches(p, q, k) for volume, accepted, _ in rule(branch)
    )


def tables(case: int, k: int) -> tuple[Table, Table]:
    """Random, opposite, partly disjoint, sparse, equal and point-mass pairs."""
    rng = np.random.default_rng([case, k])
    p, q = (plain.random_table(rng, V, k + 1, alpha) for alpha in (1.0, 0.5))
    match case % KINDS:
        case 1:
            q = {x: np.sort(row)[np.argsort(np.argsort(-p[x]))] for x, row in q.items()}
        case 2:
            p = {x: _without(row, sum(x) % V) for x, row in p.items()}
        case 3:
            q = {x: _without(row, sum(x) % V) for x, row in q.items()}
        case 4:
            q = {x: p[x] if len(x) % 2 else row for x, row in q.items()}
        case 5:
            q = {x: np.eye(V)[int(row.argmax())] for x, row in q.items()}
    return p, q


def _without(row: Distribution, token: int) -> Distribution:
    kept = np.where(np.arange(V) == token, 0.0, row)
    return np.asarray(kept / kept.sum(), np.float64)


def cases(*tokens: int) -> list[Any]:
    """One case of each kind of `tables` for each k; two more with the whole matrix."""
    return [
        pytest.param(case, k, marks=[pytest.mark.full] * (case >= KINDS)) for k in tokens for case in range(3 * KINDS)
    ]


@pytest.mark.parametrize("rule", [by_rejection, by_block])
@pytest.mark.parametrize(("case", "k"), cases(0, 1, 2, 3))
def test_law_is_the_targets(rule: Rule, case: int, k: int) -> None:
    p, q = tables(case, k)
    assert error(speculative_distribution(rule, p, q, k), target_distribution(p, k + 1)) < EXACT


@pytest.mark.parametrize(("case", "k"), cases(0, 1, 2, 3))
def test_coupled_law_is_the_targets(case: int, k: int) -> None:
    """The noise is integrated in closed form, position by position."""
    p, q = tables(case, k)
    masses: Masses = defaultdict(float)
    for x in product(range(V), repeat=k):
        joints = [plain.coupled_joint(p[x[:i]], q[x[:i]]) for i in range(k)]
        proposal = Proposal(1, x, (1.0,) * k)
        for y in product(range(V), repeat=k + 1):
            mass = float(p[x][y[k]] * np.prod([joints[i][x[i], y[i]] for i in range(k)]))
            node = coupled_walk(proposal, y)
            if mass > 0:
                continued(masses, (*x[: node + 1], y[node + 1]), mass, p, k + 1)
    assert error(masses, target_distribution(p, k + 1)) < EXACT


@pytest.mark.parametrize(("case", "k"), cases(1))
def test_the_probability_of_a_coupled_match_is_the_formula(case: int, k: int) -> None:
    p, q = (table[()] for table in tables(case, k))
    joint = plain.coupled_joint(p, q)
    formula = plain.coupled_match(p, q)
    distance = np.abs(p - q).sum() / 2
    assert abs(float(np.trace(joint)) - formula) < EXACT
    assert np.abs(joint.sum(axis=0) - p).max() < EXACT
    assert np.abs(joint.sum(axis=1) - q).max() < EXACT
    assert (1 - distance) / (1 + distance) - EXACT <= formula <= 1 - distance + EXACT


@pytest.mark.parametrize(("case", "k"), cases(1, 2, 3))
def test_block_is_never_worse_than_rejection(case: int, k: int) -> None:
    p, q = tables(case, k)
    assert expected_length(by_block, p, q, k) >= expected_length(by_rejection, p, q, k) - EXACT


def test_block_is_better_somewhere() -> None:
    p, q = tables(0, 3)
    assert expected_length(by_block, p, q, 3) > expected_length(by_rejection, p, q, 3) + 1e-3


@pytest.mark.parametrize("rule", [by_rejection, by_block])
@pytest.mark.parametrize(("case", "k"), cases(1))
def test_one_token_is_accepted_with_the_overlap(rule: Rule, case: int, k: int) -> None:
    p, q = tables(case, k)
    assert abs(expected_length(rule, p, q, k) - float(np.minimum(p[()], q[()]).sum())) < EXACT


# Mutants: the enumeration must see each of these.


def plain_p_after_rejection(branch: Branch) -> Iterator[tuple[float, int, Distribution]]:
    for volume, accepted, _ in by_rejection(branch):
        yield volume, accepted, branch.p_rows[accepted]


def rejection_residual_in_block(branch: Branch) -> Iterator[tuple[float, int, Distribution]]:
    for volume, accepted, after in by_block(branch):
        if accepted < len(branch.x):
            p, q = branch.p_rows[accepted], branch.q_rows[accepted]
            yield volume, accepted, recovered_distribution(residual(p, q), p)
        else:
            yield volume, accepted, after


def block_that_stops_at_the_first_failure(branch: Branch) -> Iterator[tuple[float, int, Distribution]]:
    weights = block_weights(branch.p, branch.q)
    left = [residual(p, q, w) for p, q, w in zip(branch.p_rows, branch.q_rows, weights, strict=False)]
    thresholds = block_thresholds(weights, [float(row.sum()) for row in left])
    for volume, (_, high) in cells(thresholds):
        passed = [u < h for u, h in zip(high, thresholds, strict=True)]
        accepted = (*passed, False).index(False)
        after = left[accepted] if accepted < len(branch.x) else branch.p_rows[-1]
        yield volume, accepted, recovered_distribution(after, branch.p_rows[accepted])


def one_draw_for_the_whole_round(branch: Branch) -> Iterator[tuple[float, int, Distribution]]:
    ends = sorted({0.0, 1.0, *(min(1.0, p / q) for p, q in zip(branch.p, branch.q, strict=True))})
    for low, high in pairwise(ends):
        accepted = rejection_length([(low + high) / 2] * len(branch.x), branch.p, branch.q)
        p = branch.p_rows[accepted]
        after = residual(p, branch.q_rows[accepted]) if accepted < len(branch.x) else p
        yield high - low, accepted, recovered_distribution(after, p)


def coarser_q(branch: Branch) -> Iterator[tuple[float, int, Distribution]]:
    rounded = [np.round(row * 16 + 1) / np.round(row * 16 + 1).sum() for row in branch.q_rows]
    yield from by_rejection(Branch(branch.x, branch.p_rows, rounded))


@pytest.mark.parametrize(
    "mutant",
    [
        plain_p_after_rejection,
        rejection_residual_in_block,
        block_that_stops_at_the_first_failure,
        one_draw_for_the_whole_round,
        coarser_q,
    ],
)
def test_mutants_are_seen(mutant: Rule) -> None:
    p, q = tables(0, 3)
    assert error(speculative_distribution(mutant, p, q, 3), target_distribution(p, 4)) > 1e-3
