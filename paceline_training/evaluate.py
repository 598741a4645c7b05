"""What a draft will be worth, from held-out text and the serving path.

Teacher-forced passes give the exact distribution of token-wise rounds (docs/exactness.md §7): the target's own
text is replayed, token x is accepted with probability 1 / (p_x Σ_j max(p_j / p_x, q_j / q_x)) under the coupled rule
(min(1, q_x / p_x) under rejection), and a round ends at the first failure or after k + 1 tokens. Both distributions
are what services would draw from: logits of serving engines, processed by the request's own chain.

A draft that reads the target's features predicts a token differently at each depth of a round: features are known up
to the round's first token, so deeper rows read less. Such a draft is replayed from every place where a round may
begin.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.engine.features import FeatureEngine, FeatureRows, feature_source
from paceline.engine.interface import Engine, Logits, StepItem, StepPlan
from paceline.protocol.errors import Unsupported
from paceline.protocol.features import NO_FEATURES, FeatureNeed
from paceline.protocol.sampling import SamplingParams
from paceline.sampling.distribution import probabilities, processed_scores
from paceline_training.corpus import Role, Row

MAX_K = 8
"""Largest number of proposed tokens in a round that the tables cover."""
CHUNK_ROWS = 64
"""Rows of a replayed text in one step."""
_TIMED_STEPS = 30
"""Steps of each engine whose median time is its cost; chosen, not tuned."""
_SESSION = 1 << 30
"""A session number of our own; engines are not shared while they are measured."""

Distribution = NDArray[np.float64]
"""[V], sums to 1."""


def overlap(p: Distribution, q: Distribution) -> float:
    """Σ min(p, q) = 1 - TV: what rejection accepts."""
    return float(np.minimum(p, q).sum())


def coupled_acceptance(p: Distribution, q: Distribution, token: int) -> float:
    """P(the draft proposed `token` | the target drew it) with shared noise (docs/exactness.md §1a)."""
    if p[token] <= 0 or q[token] <= 0:
        return 0.0
    return float(1 / (p[token] * np.maximum(p / p[token], q / q[token]).sum()))


def coupled_match(p: Distribution, q: Distribution) -> float:
    """P(draft and target draw the same token) with shared noise: Σ_i 1 / Σ_j max(p_j / p_i, q_j / q_i).

    By order of p / q the inner sums are running sums, so one sort replaces V² terms.
    """
    both = (p > 0) & (q > 0)
    ratio = np.full(p.size, -1.0)  # q_j alone: always on q's side
    ratio[both] = p[both] / q[both]
    ratio[(p > 0) & (q <= 0)] = np.inf
    order = np.argsort(-ratio, kind="stable")
    p, q, ratio, both = p[order], q[order], ratio[order], both[order]
    p_above = np.cumsum(p)
    q_below = np.concatenate([np.cumsum(q[::-1])[::-1][1:], [0.0]])
    return float((1 / (p_above[both] / p[both] + q_below[both] / q[both])).sum())


@dataclass(frozen=True, eq=False)
class HeldOutReplay:
    """Figures of one replayed text, by position."""

    accepted: NDArray[np.float64]  # [positions, MAX_K] that the emitted token, drafted at each depth, is accepted
    overlaps: NDArray[np.float64]  # [positions] 1 - TV of the first drafted token
    matches: NDArray[np.float64]  # [positions] coupled match of the first drafted token
    roles: NDArray[np.int8]  # [positions]

    def of_role(self, role: Role) -> HeldOutReplay:
        """The positions of one role."""
        mask = self.roles == role
        return HeldOutReplay(self.accepted[mask], self.overlaps[mask], self.matches[mask], self.roles[mask])


def replay(target: Engine, draft: Engine, row: Row, temperature: float) -> HeldOutReplay:
    """Replay a text that was written at `temperature`; positions are those of the learned tokens.

    Raises:
        Unsupported: a draft that reads features, and a target engine that gives none.
    """
    params = SamplingParams(temperature=temperature)
    positions = np.flatnonzero(row.loss_mask)
    positions = positions[positions > 0]
    reading = read_text(target, row, positions, draft.need if isinstance(draft, FeatureEngine) else NO_FEATURES)
    target_probabilities = [probabilities(scores) for scores in processed_scores(reading.logits, params)]
    accepted = np.zeros((positions.size, MAX_K))
    firsts = np.zeros((positions.size, 2))
    draft_logits = _by_token(draft, row, positions)
    if isinstance(draft, FeatureEngine):
        draft_logits = by_depth(draft, row, positions, reading.features)
    for place, depth, logits in draft_logits:
        p, q = target_probabilities[place], probabilities(processed_scores(logits[None], params)[0])
        accepted[place, depth] = coupled_acceptance(p, q, int(row.token_ids[positions[place]]))
        if depth == 0:
            firsts[place] = overlap(p, q), coupled_match(p, q)
    if not isinstance(draft, FeatureEngine):
        accepted[:] = accepted[:, :1]
    return HeldOutReplay(accepted, firsts[:, 0], firsts[:, 1], row.roles[positions])


def _by_token(draft: Engine, row: Row, positions: NDArray[np.intp]) -> Iterator[tuple[int, int, Logits]]:
    """For each learned token its index, depth 0, and the draft's logits before it, the same at every depth."""
    for place, logits in enumerate(read_text(draft, row, positions, NO_FEATURES).logits):
        yield place, 0, logits


def by_depth(
    draft: FeatureEngine, row: Row, positions: NDArray[np.intp], features: FeatureRows, most: int = MAX_K
) -> Iterator[tuple[int, int, Logits]]:
    """The same for a draft that reads features: every token at each of `most` depths, in the order of rounds."""
    tokens = tuple(row.token_ids.tolist())
    places = {int(at): place for place, at in enumerate(positions)}
    draft.open(_SESSION, len(tokens))
    depths = most if draft.reach is None else min(most, draft.reach)
    try:
        base_length = 0
        for root in range(len(tokens) - 1):
            chain = range(root + 1, min(root + depths, len(tokens) - 1) + 1)  # what the root's round drafts
            if not any(at in places for at in chain):
                continue
            first = max(base_length - 1, 0)
            if first < root:
                draft.give(_SESSION, first, features[first:root])
            rows = tuple(at - 1 - base_length for at in chain if at in places)
            plan = StepPlan((StepItem(_SESSION, base_length, tokens[base_length : chain[-1]], logit_rows=rows),))
            step_logits = draft.step(plan)[0]
            for at, logits in zip((at for at in chain if at in places), step_logits, strict=True):
                yield places[at], at - 1 - root, logits
            base_length = root + 1
    finally:
        draft.close(_SESSION)


@dataclass(frozen=True, eq=False)
class Reading:
    """An engine's logits before some tokens of a text, and its features of every token but the last."""

    logits: Logits  # [positions, V], before each of them
    features: FeatureRows  # [tokens - 1, layers · hidden]


def read_text(engine: Engine, row: Row, positions: NDArray[np.intp], need: FeatureNeed) -> Reading:
    """Have an engine read a text in chunks; `positions` are the tokens that logits are returned for.

    Raises:
        Unsupported: features are needed of an engine that gives none.
    """
    if need.any and engine.info.features is None:
        raise Unsupported(f"{engine.info.fingerprint.model}: its engine gives no hidden states")
    tokens = tuple(row.token_ids.tolist())
    engine.open(_SESSION, len(tokens))
    logits = [np.empty((0, engine.info.fingerprint.vocab_size), np.float32)]
    features: list[FeatureRows] = []
    try:
        if need.any:
            feature_source(engine).keep_features(_SESSION, need)
        for start in range(0, len(tokens) - 1, CHUNK_ROWS):
            end = min(start + CHUNK_ROWS, len(tokens) - 1)
            rows = tuple(int(at) - 1 - start for at in positions if start < at <= end)
            logits.append(
                engine.step(StepPlan((StepItem(_SESSION, start, tokens[start:end], logit_rows=rows),)))[0].copy()
            )
            if need.any:
                features.append(feature_source(engine).features(_SESSION).copy())
    finally:
        engine.close(_SESSION)
    return Reading(np.concatenate(logits), np.concatenate(features) if need.any else np.empty((0, 0), np.float32))


def rounds_of(accepted: NDArray[np.float64], k: int) -> tuple[float, NDArray[np.float64]]:
    """Expected rounds that replay a text, and how many of them accept at least 1 … k tokens.

    Rounds that the text's end cuts short are left out: they say nothing of the depths that it has no token for.

    Args:
        accepted: [positions, depths] probability that each token, if it is drafted at a depth, is accepted.
        k: tokens proposed in each round.

    Returns:
        Rounds, and [k] expected rounds in which the first d tokens are accepted.
    """
    begins, survival = round_flow(accepted, k)
    whole = max(0, len(accepted) - k + 1)
    return float(begins[:whole].sum()), begins[:whole] @ survival[:whole]


def round_flow(accepted: NDArray[np.float64], k: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Where rounds begin that replay a text, and how far they get.

    The text's end cuts accepted tokens, not offered ones: a token behind it is not accepted.

    Args:
        accepted, k: as `rounds_of` has them; one depth: the same at every depth.

    Returns:
        [positions] chance that a round begins with each token, [positions, k] chance that its first d are accepted.
    """
    positions, depths = len(accepted), np.arange(k)
    padded_acceptance = np.concatenate([accepted, np.zeros((k, accepted.shape[1]))])
    columns = np.minimum(depths, accepted.shape[1] - 1)
    survival = np.cumprod(padded_acceptance[np.arange(positions)[:, None] + depths, columns], axis=1)
    ends = -np.diff(survival, axis=1, prepend=1.0, append=0.0)  # [positions, k + 1] chance that 0 … k are accepted
    begins = np.zeros(positions + k + 1)
    begins[0] = 1.0
    for at in range(positions):
        begins[at + 1 : at + k + 2] += begins[at] * ends[at]
    return begins[:positions], survival


@dataclass(frozen=True)
class AcceptanceTable:
    """Acceptance on held-out text written at one temperature.

    Attributes:
        overlap: mean 1 - TV.
        coupled_match: mean probability that both draw the same token.
        by_depth: P(token d accepted | the d - 1 before it were), d = 1 … 8, in rounds of k = 8.
        accepted_length: mean tokens accepted a round for k = 1 … 8; one more is committed.
    """

    temperature: float
    part: str
    positions: int
    overlap: float
    coupled_match: float
    by_depth: tuple[float, ...]
    accepted_length: tuple[float, ...]


def acceptance_tables(
    target: Engine, draft: Engine, rows: Sequence[Row], report: Callable[[int], None] | None = None
) -> tuple[AcceptanceTable, ...]:
    """Replay held-out rows at the temperature that each was written at; answers, and thinking where there is some."""
    tables: list[AcceptanceTable] = []
    replay_count = 0
    for temperature in sorted({row.temperature for row in rows}):
        replays: list[HeldOutReplay] = []
        for row in (row for row in rows if row.temperature == temperature):
            replays.append(replay(target, draft, row, temperature))
            replay_count += 1
            if report is not None:
                report(replay_count)
        for role in (Role.ANSWER, Role.THINKING):
            parts = [part for each in replays if (part := each.of_role(role)).accepted.size]
            if parts:
                tables.append(_table(temperature, role.name.lower(), parts))
    return tuple(tables)


def _table(temperature: float, part: str, replays: Sequence[HeldOutReplay]) -> AcceptanceTable:
    lengths: list[float] = []
    for k in range(1, MAX_K + 1):
        rounds, depth_rounds = _all_rounds(replays, k)
        lengths.append(float(depth_rounds.sum() / rounds) if rounds else 0.0)
    rounds, depth_rounds = _all_rounds(replays, MAX_K)
    previous_rounds = np.concatenate([[rounds], depth_rounds[:-1]])
    by_depth = np.divide(depth_rounds, previous_rounds, out=np.zeros(MAX_K), where=previous_rounds > 0)
    overlaps = np.concatenate([each.overlaps for each in replays])
    matches = np.concatenate([each.matches for each in replays])
    return AcceptanceTable(
        temperature,
        part,
        int(overlaps.size),
        float(overlaps.mean()),
        float(matches.mean()),
        tuple(by_depth.tolist()),
        tuple(lengths),
    )


def _all_rounds(replays: Sequence[HeldOutReplay], k: int) -> tuple[float, NDArray[np.float64]]:
    counts = [rounds_of(each.accepted, k) for each in replays]
    return sum(rounds for rounds, _ in counts), np.sum([depth_rounds for _, depth_rounds in counts], axis=0)


@dataclass(frozen=True)
class CostRatio:
    """Time of one decoding step behind a short prefix, medians on this machine."""

    target_ms: float
    draft_ms: float

    @property
    def ratio(self) -> float:
        """Draft step over target step."""
        return self.draft_ms / self.target_ms


def cost_ratio(target: Engine, draft: Engine, prefix: Sequence[int]) -> CostRatio:
    """Measure a step of one row of each, in turns, so that both see the same load."""
    engines = (target, draft)
    length = len(prefix)
    for engine in engines:
        engine.open(_SESSION, length + 1)
        engine.step(StepPlan((StepItem(_SESSION, 0, tuple(prefix), logit_rows=(length - 1,)),)))
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(_TIMED_STEPS):
        for engine, samples in zip(engines, times, strict=True):
            began = time.perf_counter()
            engine.step(StepPlan((StepItem(_SESSION, length, (prefix[-1],), logit_rows=(0,)),)))
            samples.append(1000 * (time.perf_counter() - began))
    for engine in engines:
        engine.close(_SESSION)
    return CostRatio(*(float(np.median(samples)) for samples in times))
