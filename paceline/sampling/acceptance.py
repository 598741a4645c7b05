"""The acceptance rules: how a proposal and a verdict become committed tokens.

Symbols. p: the target's processed distribution at a position; q: the distribution that the drafted
token x_i was really sampled from; k: tokens proposed; u_i: the accept draw of x_i; [z]+ = max(z, 0).

coupled    Draft and target race the same noise (Daliri, Musco, Suresh, arXiv 2408.07978). The target
           emits its own token y at every node and walks down while a child proposes y. The text is
           the target's own with that seed, whatever was proposed.
rejection  Accept x_i iff u_i q(x_i) < p(x_i); at the first failure emit r_i ~ norm([p - q]+)
           (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).
block      Accept the longest prefix that its own draw allows (Sun et al., arXiv 2403.10444): a token
           refused at one length may be let in by a longer one.

The target draws before it knows what is accepted: `draw_coupled`, `draw_rejection` and `draw_block`
run there, `decide` on the coordinator. Given the context, x_i, u_i and r_i are independent, because
they are draws of different streams; that is all that exactness needs.

All is float64. q on the wire is float32 and may miss a sum of 1 by rounding, while the race that drew
x_i knows q only up to a factor: every use of q here divides by its sum first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.protocol.errors import InvalidInput, ProtocolMismatch, require
from paceline.protocol.generation import Provenance
from paceline.protocol.proposal import ROOT, Acceptance, Outcome, Proposal
from paceline.protocol.sampling import NoiseKey
from paceline.protocol.target import Round, Verdict
from paceline.sampling.distribution import probabilities
from paceline.sampling.noise import Stream, uniform
from paceline.sampling.racing import race, race_rows
from paceline.sampling.tree import child_with_token, is_leaf

Distribution = NDArray[np.float64]
"""[V], sums to 1."""

EMPTY = Proposal(proposal_id=0, token_ids=(), draft_probabilities=())


@dataclass(frozen=True)
class Decision:
    """The end of a round.

    `node` is the last accepted node or `ROOT`, `accepted` the tokens down to it, `next_token` the one
    after them and `provenance` where that came from.
    """

    node: int
    accepted: tuple[int, ...]
    next_token: int
    provenance: Provenance

    @property
    def committed(self) -> tuple[int, ...]:
        """Every token that the round commits, in order."""
        return (*self.accepted, self.next_token)

    def outcome(self, base_length: int) -> Outcome:
        """The round's outcome, which names the next proposal."""
        return Outcome(base_length, self.node, self.next_token)


# The coordinator's side


def decide(acceptance: Acceptance, round_: Round, verdict: Verdict, noise: NoiseKey) -> Decision:
    """Apply the rule to one round.

    Raises:
        ProtocolMismatch: the verdict answers another round, or its lengths don't fit.
        InvalidInput: a tree, or a q that is missing, under rejection or block acceptance.
    """
    proposal = round_.proposal or EMPTY
    _check_verdict(acceptance, round_, proposal, verdict)
    if acceptance is Acceptance.COUPLED:
        node = coupled_walk(proposal, verdict.token_ids)
    else:
        q = drafted_probabilities(proposal)
        positions = range(round_.first_position, round_.first_position + len(proposal))
        draws = [uniform(noise, Stream.ACCEPT, position, round_.base_length) for position in positions]
        p = verdict.target_probabilities
        if acceptance is Acceptance.REJECTION:
            node = rejection_length(draws, p, q) - 1
        else:
            node = block_length(draws, block_weights(p, q), verdict.residual_masses) - 1
    accepted = tuple(proposal.token_ids[i] for i in proposal.path(node))
    return Decision(node, accepted, verdict.token_ids[node + 1], _provenance(proposal, node))


def coupled_walk(proposal: Proposal, target_tokens: Sequence[int]) -> int:
    """Walk down while a child proposes the target's own token. Returns the last node reached, or `ROOT`.

    `target_tokens[0]` follows the root, `target_tokens[i + 1]` follows node i.
    """
    node = ROOT
    while (child := child_with_token(proposal, node, target_tokens[node + 1])) is not None:
        node = child
    return node


def accepts(u: float, p: float, q: float) -> bool:
    """Token-wise rule (2211.17192, §2.3). Strict: with u = 0 a token with p = 0 must not get in."""
    return u * q < p


def rejection_length(draws: Sequence[float], p: Sequence[float], q: Sequence[float]) -> int:
    """The number of tokens that are accepted before the first rejection; p, q of the drafted tokens."""
    for i, (u, p_i, q_i) in enumerate(zip(draws, p, q, strict=True)):
        if not accepts(u, p_i, q_i):
            return i
    return len(draws)


def block_weights(p: Sequence[float], q: Sequence[float]) -> tuple[float, ...]:
    """w_0 = 1, w_i = min(1, w_{i-1} p(x_i) / q(x_i)) (2403.10444, algorithm 2). Returns k + 1 weights."""
    weights = [1.0]
    for p_i, q_i in zip(p, q, strict=True):
        weights.append(min(1.0, weights[-1] * p_i / q_i))
    return tuple(weights)


def block_thresholds(weights: Sequence[float], masses: Sequence[float]) -> tuple[float, ...]:
    """h_1 … h_k: h_i = S_i / (S_i + 1 - w_i) for i < k, and h_k = w_k (2403.10444, algorithm 2).

    Args:
        weights: w_0 … w_k.
        masses: S_0 … S_{k-1}, S_i the mass of [w_i p - q]+ after x_1 … x_i.
    """
    k = len(masses)
    thresholds = []
    for w, mass in zip(weights[1:k], masses[1:], strict=True):
        denominator = mass + (1 - w)  # in this order: a small mass must not be lost beside 1
        # w = 1 and no residual: nothing could be emitted here, so the prefix stands.
        thresholds.append(mass / denominator if denominator > 0 else 1.0)
    return (*thresholds, weights[k]) if k else ()


def block_length(draws: Sequence[float], weights: Sequence[float], masses: Sequence[float]) -> int:
    """The LARGEST i with u_i < h_i, 0 if none; a failure at i says nothing about longer prefixes."""
    thresholds = block_thresholds(weights, masses)
    lengths = [i for i, (u, h) in enumerate(zip(draws, thresholds, strict=True), start=1) if u < h]
    return max(lengths, default=0)


# The target's side


def draw_coupled(
    scores: NDArray[np.float32], positions: Sequence[int], noise: NoiseKey, divisor: float = 1.0
) -> tuple[int, ...]:
    """The target's own token after each row of [n + 1, V] over a divisor, by the noise of the row's position.

    The root's row draws the round's first position, the row of a node at depth d draws d further
    (`draw_positions`). No round key: the text must not depend on how it was cut into rounds.
    """
    return tuple(race_rows(scores, 1, noise, Stream.DRAFT, positions, divisor=divisor)[:, 0].tolist())


def draw_positions(round_: Round) -> tuple[int, ...]:
    """The position that each row draws: the root's row, then each node's."""
    depths = (round_.proposal or EMPTY).depths
    return tuple(round_.first_position + depth for depth in (0, *depths))


def draw_rejection(
    scores: NDArray[np.float32], round_: Round, noise: NoiseKey
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Pre-draw a chain's verdict from rows [k + 1, V].

    Returns:
        p(x_i) for each proposed token, and the k recovered tokens r_i ~ norm([p - q]+), then the bonus.

    Raises:
        InvalidInput: a tree, a q that is missing, or rows that don't fit the proposal.
    """
    p, _, tokens = _draw_chain(scores, round_, noise, is_block=False)
    return p, tokens


def draw_block(
    scores: NDArray[np.float32], round_: Round, noise: NoiseKey
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[int, ...]]:
    """Pre-draw a chain's verdict for block acceptance from rows [k + 1, V].

    Returns:
        p(x_i) for each proposed token; S_0 … S_{k-1}; the recovered tokens r_i ~ norm([w_i p - q]+),
        i = 0 … k-1, then the bonus. They are not interchangeable with those of `draw_rejection`.

    Raises:
        InvalidInput: a tree, a q that is missing, or rows that don't fit the proposal.
    """
    return _draw_chain(scores, round_, noise, is_block=True)


def _draw_chain(
    scores: NDArray[np.float32], round_: Round, noise: NoiseKey, *, is_block: bool
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[int, ...]]:
    """What `draw_block` returns, with every w_i = 1 unless `is_block`."""
    proposal = round_.proposal or EMPTY
    _check_chain(proposal)
    rows, vocab_size = scores.shape
    require(rows == len(proposal) + 1, "rows", rows, f"{len(proposal) + 1}, the root's and one for each node")
    p_rows = [probabilities(row) for row in scores[:-1]]
    q_rows = [drafted_distribution(proposal, node, vocab_size) for node in range(len(proposal))]
    p = tuple(float(row[x]) for row, x in zip(p_rows, proposal.token_ids, strict=True))
    weights = block_weights(p, drafted_probabilities(proposal)) if is_block else (1.0,) * len(p)
    masses, tokens = [], []
    for i, (p_row, q_row) in enumerate(zip(p_rows, q_rows, strict=True)):
        leftover = residual(p_row, q_row, weights[i])
        masses.append(float(leftover.sum()))
        log_weights = log_of(recovered_distribution(leftover, p_row))
        tokens.append(race(log_weights, noise, Stream.RESIDUAL, round_.first_position + i, round_.base_length))
    position = round_.first_position + len(proposal)
    bonus = race(scores[-1], noise, Stream.DRAFT, position, round_.base_length)
    return p, tuple(masses), (*tokens, bonus)


def residual(p: Distribution, q: Distribution, weight: float = 1.0) -> NDArray[np.float64]:
    """[w p - q]+, not normalised: the mass that the draft leaves to be emitted. Returns [V]."""
    return np.maximum(weight * p - q, 0.0)


def recovered_distribution(leftover: NDArray[np.float64], p: Distribution) -> Distribution:
    """norm of a residual; p itself where rounding left the residual no mass. Returns [V]."""
    total = float(leftover.sum())
    return leftover / total if total > 0 else p


def log_of(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Natural logarithms of weights at least 0, -inf of 0. Returns [V]."""
    return np.log(weights, out=np.full(weights.size, -np.inf), where=weights > 0)


# Both sides


def drafted_probabilities(proposal: Proposal) -> tuple[float, ...]:
    """q(x_i) for each token of a chain: its support's value over the support's sum.

    Raises:
        InvalidInput: no support, unless q(x_i) = 1 (a deterministic drafter).
    """
    _check_chain(proposal)
    if not proposal.supports:
        return proposal.draft_probabilities
    pairs = zip(proposal.supports, proposal.token_ids, strict=True)
    return tuple(support.probability(x) / math.fsum(support.probabilities) for support, x in pairs)


def drafted_distribution(proposal: Proposal, node: int, vocab_size: int) -> Distribution:
    """q of one token of a chain, a point mass if it brings no support. Returns [V]."""
    q = np.zeros(vocab_size)
    require(
        proposal.token_ids[node] < vocab_size, "drafted token id", proposal.token_ids[node], f"below {vocab_size}"
    )
    if not proposal.supports:
        q[proposal.token_ids[node]] = 1.0
        return q
    support = proposal.supports[node]
    require(support.token_ids[-1] < vocab_size, "support token id", support.token_ids[-1], f"below {vocab_size}")
    q[list(support.token_ids)] = np.asarray(support.probabilities) / math.fsum(support.probabilities)
    return q


def _provenance(proposal: Proposal, node: int) -> Provenance:
    if not proposal.token_ids:
        return Provenance.TARGET
    return Provenance.BONUS if is_leaf(proposal.parents, node) else Provenance.RECOVERED


def _check_chain(proposal: Proposal) -> None:
    require(proposal.is_chain, "proposal parents", proposal.parents, "a chain under rejection and block acceptance")
    certain = all(q == 1 for q in proposal.draft_probabilities)
    if not proposal.supports and not certain:
        raise InvalidInput.of("proposal supports", 0, "one for each token whose q is below 1")


def _check_verdict(acceptance: Acceptance, round_: Round, proposal: Proposal, verdict: Verdict) -> None:
    k = len(proposal)
    sends_p = acceptance is not Acceptance.COUPLED
    sends_masses = acceptance is Acceptance.BLOCK
    for name, actual, expected in (
        ("base_length", verdict.base_length, round_.base_length),
        ("token_ids", len(verdict.token_ids), k + 1),
        ("target_probabilities", len(verdict.target_probabilities), k if sends_p else 0),
        ("residual_masses", len(verdict.residual_masses), k if sends_masses else 0),
    ):
        if actual != expected:
            raise ProtocolMismatch(
                f"verdict {name}: {actual}, expected {expected}",
                metadata={"field": name, "value": str(actual), "limit": str(expected)},
            )
    for value in (*verdict.target_probabilities, *verdict.residual_masses):
        if not 0 <= value <= 1 + 1e-9:
            raise ProtocolMismatch(f"verdict probability {value!r}: must be in [0, 1]")
