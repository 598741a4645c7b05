"""`decide` and the target's pre-drawn verdicts: their draws, their distribution, their corners."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from paceline.protocol.errors import InvalidInput, ProtocolMismatch
from paceline.protocol.generation import Provenance
from paceline.protocol.proposal import ROOT, Acceptance, Outcome, Proposal, SparseDistribution
from paceline.protocol.sampling import NoiseKey
from paceline.protocol.target import Round, Verdict
from paceline.sampling import acceptance as rules
from paceline.sampling.acceptance import (
    Decision,
    block_length,
    block_thresholds,
    block_weights,
    decide,
    drafted_probabilities,
    draw_block,
    draw_coupled,
    draw_positions,
    draw_rejection,
    recovered_distribution,
    rejection_length,
    residual,
)
from paceline.sampling.distribution import probabilities, sparse_support, support_scores
from paceline.sampling.noise import Stream, uniform
from paceline.sampling.racing import race, race_best
from tests.sampling import plain
from tests.sampling.plain import Table

BASE = 10
COMMITTED = (5,)
FIRST = BASE + len(COMMITTED)
DEEP = plain.random_table(np.random.default_rng(9), 3, 8)


def round_of(proposal: Proposal | None) -> Round:
    return Round(session_id=1, base_length=BASE, accepted_node=ROOT, committed=COMMITTED, proposal=proposal)


def log_scores(rows: Sequence[NDArray[np.float64]]) -> NDArray[np.float32]:
    with np.errstate(divide="ignore"):
        return np.log(np.array(rows)).astype(np.float32)


def drafted_chain(q: Table, k: int, key: NoiseKey, max_entries: int = 256) -> Proposal:
    """A chain drawn as a drafter draws it under rejection and block acceptance."""
    x: tuple[int, ...] = ()
    supports = []
    for i in range(k):
        support = sparse_support(log_scores([q[x]])[0], max_entries, 1.0)
        scores = support_scores(support, len(q[x]))
        supports.append(support)
        x = (*x, race(scores, key, Stream.DRAFT, FIRST + i, BASE))
    probabilities_of_x = tuple(support.probability(token) for support, token in zip(supports, x, strict=True))
    return Proposal(1, x, probabilities_of_x, supports=tuple(supports))


def verdict_of(kind: Acceptance, scores: NDArray[np.float32], round_: Round, key: NoiseKey) -> Verdict:
    if kind is Acceptance.COUPLED:
        return Verdict(1, BASE, draw_coupled(scores, draw_positions(round_), key))
    if kind is Acceptance.REJECTION:
        p, tokens = draw_rejection(scores, round_, key)
        return Verdict(1, BASE, tokens, p)
    p, masses, tokens = draw_block(scores, round_, key)
    return Verdict(1, BASE, tokens, p, masses)


def play(kind: Acceptance, p: Table, proposal: Proposal | None, key: NoiseKey) -> Decision:
    """One round against the target's table."""
    round_ = round_of(proposal)
    paths = [()] if proposal is None else [(), *(proposal.path(node) for node in range(len(proposal)))]
    prefixes = [tuple(proposal.token_ids[n] for n in path) if proposal else () for path in paths]
    scores = log_scores([p[prefix] for prefix in prefixes])
    return decide(kind, round_, verdict_of(kind, scores, round_, key), key)


# The rules at their corners

unit = st.floats(0, 1, exclude_max=True)
positive = st.floats(2.0**-149, 1)


@given(st.lists(st.tuples(unit, positive), max_size=8))
def test_q_equal_to_p_accepts_all(tokens: list[tuple[float, float]]) -> None:
    draws, p = [u for u, _ in tokens], [p for _, p in tokens]
    assert rejection_length(draws, p, p) == len(tokens)
    assert block_length(draws, block_weights(p, p), [0.0] * len(tokens)) == len(tokens)


def test_block_without_residual_or_missing_mass_stands() -> None:
    # A mass that 1 would swallow: w = 1, so the prefix is certain.
    assert block_thresholds((1.0, 1.0, 1.0), (0.5, 1.2e-16)) == (1.0, 1.0)
    assert block_thresholds((1.0, 1.0, 0.5), (0.0, 0.0)) == (1.0, 0.5)
    assert block_thresholds((1.0,), ()) == ()
    assert block_length([], (1.0,), []) == 0


def test_residual_of_nothing_is_p() -> None:
    p = np.array([0.5, 0.5, 0.0])
    assert recovered_distribution(residual(p, p), p).tolist() == p.tolist()
    assert recovered_distribution(residual(p, p, 0.0), p).tolist() == p.tolist()
    left = residual(p, np.array([0.25, 0.0, 0.75]))
    assert left.tolist() == [0.25, 0.5, 0]
    assert recovered_distribution(left, p).tolist() == pytest.approx([1 / 3, 2 / 3, 0])


# decide


@pytest.mark.parametrize("kind", list(Acceptance))
@pytest.mark.parametrize("proposal", [None, Proposal(1, (), ())])
def test_a_round_without_a_proposal_emits_the_targets_token(kind: Acceptance, proposal: Proposal | None) -> None:
    key = NoiseKey(3)
    p: Table = {(): np.array([0.1, 0.2, 0.3, 0.4])}
    decision = play(kind, p, proposal, key)
    round_key = 0 if kind is Acceptance.COUPLED else BASE
    token = race(log_scores([p[()]])[0], key, Stream.DRAFT, FIRST, round_key)
    assert decision == Decision(ROOT, (), token, Provenance.TARGET)
    assert decision.committed == (token,)
    assert decision.outcome(BASE) == Outcome(BASE, ROOT, token)


@pytest.mark.parametrize("kind", list(Acceptance))
def test_a_token_of_probability_zero_is_never_emitted(kind: Acceptance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "uniform", lambda *_: 0.0)
    rng = np.random.default_rng(2)
    p = plain.random_table(rng, 4, 4)
    for x, row in p.items():
        row[sum(x) % 4] = 0
        row /= row.sum()
    q = plain.random_table(rng, 4, 4)
    for seed in range(300):
        decision = play(kind, p, drafted_chain(q, 3, NoiseKey(seed)), NoiseKey(seed))
        for i, token in enumerate(decision.committed):
            assert p[decision.committed[:i]][token] > 0


def test_the_targets_draws_are_of_the_stated_streams_positions_and_round_key() -> None:
    key = NoiseKey(17, 2)
    table = plain.random_table(np.random.default_rng(3), 4, 4)
    proposal = drafted_chain(table, 3, key)
    round_ = round_of(proposal)
    rows = log_scores([np.roll(table[proposal.token_ids[:i]], 1) for i in range(4)])
    p, tokens = draw_rejection(rows, round_, key)
    for i in range(3):
        p_row = probabilities(rows[i])
        left = residual(p_row, rules.drafted_distribution(proposal, i, 4))
        with np.errstate(divide="ignore"):
            assert tokens[i] == race(np.log(left / left.sum()), key, Stream.RESIDUAL, FIRST + i, BASE)
        assert p[i] == p_row[proposal.token_ids[i]]
    assert tokens[3] == race(rows[3], key, Stream.DRAFT, FIRST + 3, BASE)


def test_decide_follows_the_pure_rules_with_the_stated_draws() -> None:
    rng = np.random.default_rng(4)
    p, q = plain.random_table(rng, 4, 4), plain.random_table(rng, 4, 4)
    lengths: Counter[tuple[Acceptance, int]] = Counter()
    for seed in range(300):
        key = NoiseKey(seed)
        proposal = drafted_chain(q, 3, key)
        rows = log_scores([p[proposal.token_ids[:i]] for i in range(4)])
        u = [uniform(key, Stream.ACCEPT, FIRST + i, BASE) for i in range(3)]
        q_x = drafted_probabilities(proposal)
        for kind in (Acceptance.REJECTION, Acceptance.BLOCK):
            verdict = verdict_of(kind, rows, round_of(proposal), key)
            p_x = verdict.target_probabilities
            if kind is Acceptance.REJECTION:
                length = rejection_length(u, p_x, q_x)
            else:
                length = block_length(u, block_weights(p_x, q_x), verdict.residual_masses)
            decision = decide(kind, round_of(proposal), verdict, key)
            assert decision.accepted == proposal.token_ids[:length]
            assert decision.next_token == verdict.token_ids[length]
            assert decision.provenance is (Provenance.BONUS if length == 3 else Provenance.RECOVERED)
            lengths[kind, length] += 1
    assert len(lengths) == 8


def test_n_gram_proposals_are_point_masses_under_rejection() -> None:
    """q = 1 without a support: accepted with p(x), recovered from p without x."""
    p = plain.random_table(np.random.default_rng(6), 4, 2)
    proposal = Proposal(1, (2,), (1.0,))
    accepted = 0
    for seed in range(2000):
        decision = play(Acceptance.REJECTION, p, proposal, NoiseKey(seed))
        accepted += len(decision.accepted)
        assert decision.accepted or decision.next_token != 2
    assert stats.binomtest(accepted, 2000, float(p[()][2])).pvalue > 1e-6


# Distributions through the real draws


def test_truncated_supports_stay_exact() -> None:
    rng = np.random.default_rng(8)
    p, q = plain.random_table(rng, 6, 2), plain.random_table(rng, 6, 2)
    counts: Counter[int] = Counter()
    for seed in range(3000):
        key = NoiseKey(seed)
        counts[play(Acceptance.REJECTION, p, drafted_chain(q, 1, key, max_entries=2), key).committed[0]] += 1
    assert stats.chisquare([counts[v] for v in range(6)], p[()] * 3000).pvalue > 1e-6


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**64 - 1), shape=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), max_size=7))
def test_coupled_text_is_the_targets_own_for_any_tree(seed: int, shape: list[tuple[int, int]]) -> None:
    """Whatever is proposed, the committed tokens are a prefix of plain decoding with the same noise."""
    key = NoiseKey(seed)
    parents = tuple(raw % (node + 1) - 1 for node, (raw, _) in enumerate(shape))
    proposal = Proposal(1, tuple(token for _, token in shape), (1.0,) * len(shape), parents)
    decision = play(Acceptance.COUPLED, DEEP, proposal, key)
    own: tuple[int, ...] = ()
    for _ in decision.committed:
        own = (*own, race(log_scores([DEEP[own]])[0], key, Stream.DRAFT, FIRST + len(own)))
    assert decision.committed == own
    children = [n for n, parent in enumerate(parents) if parent == decision.node]
    assert all(proposal.token_ids[child] != decision.next_token for child in children)
    leaf = Provenance.RECOVERED if children else Provenance.BONUS
    assert decision.provenance is (leaf if shape else Provenance.TARGET)


@pytest.mark.parametrize("case", [0, *(pytest.param(case, marks=pytest.mark.full) for case in (1, 2))])
def test_coverage_of_coupled_trees(case: int) -> None:
    """m children are the m best of the draft's race: m = 1 by the formula, m = 2 in closed form. Fails 1 in 10^6."""
    rng = np.random.default_rng([10, case])
    p, q = rng.dirichlet([1.0] * 3), rng.dirichlet([1.0] * 3)
    p_scores, q_scores = log_scores([p, q])
    ranks: Counter[int] = Counter()
    draws = 10_000
    for position in range(draws):
        y = race(p_scores, NoiseKey(case), Stream.DRAFT, position)
        ranks[race_best(q_scores, 3, NoiseKey(case), Stream.DRAFT, position).index(y)] += 1
    first, last = plain.coupled_match(p, q), plain.last_in_draft(p, q)
    assert stats.binomtest(ranks[0], draws, first).pvalue > 1e-6
    assert stats.binomtest(ranks[2], draws, last).pvalue > 1e-6


# Malformed input


@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [
        (Acceptance.COUPLED, {"token_ids": (1, 2)}, "token_ids"),
        (Acceptance.COUPLED, {"target_probabilities": (0.5, 0.5)}, "target_probabilities"),
        (Acceptance.REJECTION, {"base_length": BASE + 1}, "base_length"),
        (Acceptance.REJECTION, {"token_ids": (1, 2, 3, 0)}, "token_ids"),
        (Acceptance.REJECTION, {"target_probabilities": (0.5,)}, "target_probabilities"),
        (Acceptance.REJECTION, {"target_probabilities": (0.5, math.nan)}, "probability"),
        (Acceptance.REJECTION, {"target_probabilities": (0.5, 1.5)}, "probability"),
        (Acceptance.REJECTION, {"residual_masses": (0.5, 0.5)}, "residual_masses"),
        (Acceptance.BLOCK, {"residual_masses": ()}, "residual_masses"),
        (Acceptance.BLOCK, {"residual_masses": (-0.1, 0.5)}, "probability"),
    ],
)
def test_verdicts_that_do_not_fit_are_refused(kind: Acceptance, change: dict[str, object], named: str) -> None:
    proposal = Proposal(1, (2, 3), (1.0, 1.0))
    fitting = verdict_of(kind, np.zeros((3, 4), np.float32), round_of(proposal), NoiseKey(0))
    assert decide(kind, round_of(proposal), fitting, NoiseKey(0)).committed
    with pytest.raises(ProtocolMismatch, match=named):
        decide(kind, round_of(proposal), replace(fitting, **change), NoiseKey(0))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Acceptance.REJECTION, Acceptance.BLOCK])
@pytest.mark.parametrize(
    ("proposal", "named"),
    [
        (Proposal(1, (2, 3), (1.0, 1.0), (-1, -1)), "proposal parents"),
        (Proposal(1, (2, 3), (0.5, 1.0)), "proposal supports"),
        (Proposal(1, (9, 3), (1.0, 1.0)), "drafted token id"),
        (Proposal(1, (1,), (0.5,), supports=(SparseDistribution((1, 9), (0.5, 0.5)),)), "support token id"),
        (Proposal(1, (2,), (1.0,), supports=(SparseDistribution((2,), (1.0,)),)), "rows"),
    ],
)
def test_proposals_that_the_rule_cannot_take_are_refused(kind: Acceptance, proposal: Proposal, named: str) -> None:
    rows = 3 if named == "rows" else len(proposal) + 1
    with pytest.raises(InvalidInput, match=named):
        verdict_of(kind, np.zeros((rows, 4), np.float32), round_of(proposal), NoiseKey(0))
