"""What a draft will be worth, from held-out text and the serving path.

Two teacher-forced passes give the exact distribution of token-wise rounds (docs/exactness.md §7): the target's own
text is replayed, token x is accepted with probability 1 / (p_x Σ_j max(p_j / p_x, q_j / q_x)) under the coupled rule
(min(1, q_x / p_x) under rejection), and a round ends at the first failure or after k + 1 tokens. Both distributions
are what services would draw from: logits of serving engines, processed by the request's own chain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.engine.interface import Engine, StepItem, StepPlan
from paceline.protocol.sampling import SamplingParams
from paceline.sampling.distribution import probabilities, processed_scores
from paceline.train.corpus import Role, Row

MAX_K = 8
"""Most tokens proposed in a round that tables tell of."""
CHUNK_ROWS = 64
"""Rows of a replayed text that are computed at once."""
_TIMED_STEPS = 30
"""Steps of each engine that a cost is the median of; chosen, not tuned."""
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
    above = np.cumsum(p)
    below = np.concatenate([np.cumsum(q[::-1])[::-1][1:], [0.0]])
    return float((1 / (above[both] / p[both] + below[both] / q[both])).sum())


@dataclass(frozen=True, eq=False)
class HeldOutReplay:
    """One text replayed: what its positions say, in order."""

    accepted: NDArray[np.float64]  # [positions] probability that the emitted token had been proposed
    overlaps: NDArray[np.float64]  # [positions] 1 - TV
    matches: NDArray[np.float64]  # [positions] coupled match
    roles: NDArray[np.int8]  # [positions]

    def of(self, role: Role) -> HeldOutReplay:
        """The positions of one role."""
        chosen = self.roles == role
        return HeldOutReplay(self.accepted[chosen], self.overlaps[chosen], self.matches[chosen], self.roles[chosen])


def replay(target: Engine, draft: Engine, row: Row, temperature: float) -> HeldOutReplay:
    """Replay a text that was written at `temperature`; positions are those of the learned tokens."""
    params = SamplingParams(temperature=temperature)
    figures: list[tuple[float, float, float]] = []
    learned = np.flatnonzero(row.learned)
    learned = learned[learned > 0]
    for at, both in _each_position((target, draft), row, learned):
        p, q = (probabilities(processed_scores(logits[None], params)[0]) for logits in both)
        figures.append((coupled_acceptance(p, q, int(row.token_ids[at])), overlap(p, q), coupled_match(p, q)))
    accepted, overlaps, matches = np.array(figures, np.float64).reshape(-1, 3).T
    return HeldOutReplay(accepted, overlaps, matches, row.roles[learned])


def _each_position(
    engines: tuple[Engine, Engine], row: Row, wanted: NDArray[np.intp]
) -> Iterator[tuple[int, list[NDArray[np.float32]]]]:
    """The place of each wanted token, and both models' logits before it; computed a chunk of the text at a time."""
    tokens = tuple(row.token_ids.tolist())
    for engine in engines:
        engine.open(_SESSION, len(tokens))
    try:
        for start in range(0, len(tokens) - 1, CHUNK_ROWS):
            end = min(start + CHUNK_ROWS, len(tokens) - 1)
            rows = tuple(int(at) - 1 - start for at in wanted if start < at <= end)
            plan = StepPlan((StepItem(_SESSION, start, tokens[start:end], logit_rows=rows),))
            found = [engine.step(plan)[0] for engine in engines]
            for place, local in enumerate(rows):
                yield start + local + 1, [logits[place] for logits in found]
    finally:
        for engine in engines:
            engine.close(_SESSION)


def rounds_of(accepted: NDArray[np.float64], k: int) -> tuple[float, NDArray[np.float64]]:
    """Expected rounds that replay a text, and how many of them accept at least 1 … k tokens.

    Rounds that the text's end would cut short are left out: it cuts accepted tokens, not offered ones.

    Args:
        accepted: [positions] probability that each token, if proposed for, is accepted.
        k: tokens proposed in each round.

    Returns:
        Rounds, and [k] expected rounds in which the first d tokens are accepted.
    """
    positions = accepted.size
    begins = np.zeros(positions + k + 1)
    begins[0] = 1.0
    reached = np.zeros(k)
    whole = max(0, positions - k + 1)
    for at in range(whole):
        alive = begins[at]
        for depth in range(k):
            passed = alive * accepted[at + depth]
            begins[at + depth + 1] += alive - passed
            reached[depth] += passed
            alive = passed
        begins[at + k + 1] += alive
    return float(begins[:whole].sum()), reached


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
    done = 0
    for temperature in sorted({row.temperature for row in rows}):
        replays: list[HeldOutReplay] = []
        for row in (row for row in rows if row.temperature == temperature):
            replays.append(replay(target, draft, row, temperature))
            done += 1
            if report is not None:
                report(done)
        for role in (Role.ANSWER, Role.THINKING):
            parts = [part for each in replays if (part := each.of(role)).accepted.size]
            if parts:
                tables.append(_table(temperature, role.name.lower(), parts))
    return tuple(tables)


def _table(temperature: float, part: str, replays: Sequence[HeldOutReplay]) -> AcceptanceTable:
    lengths: list[float] = []
    for k in range(1, MAX_K + 1):
        rounds, reached = _all_rounds(replays, k)
        lengths.append(float(reached.sum() / rounds) if rounds else 0.0)
    rounds, reached = _all_rounds(replays, MAX_K)
    before = np.concatenate([[rounds], reached[:-1]])
    by_depth = np.divide(reached, before, out=np.zeros(MAX_K), where=before > 0)
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
    counted = [rounds_of(each.accepted, k) for each in replays]
    return sum(rounds for rounds, _ in counted), np.sum([reached for _, reached in counted], axis=0)


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
        for engine, measured in zip(engines, times, strict=True):
            began = time.perf_counter()
            engine.step(StepPlan((StepItem(_SESSION, length, (prefix[-1],), logit_rows=(0,)),)))
            measured.append(1000 * (time.perf_counter() - began))
    for engine in engines:
        engine.close(_SESSION)
    return CostRatio(*(float(np.median(measured)) for measured in times))
