"""`paceline simulate`: a trace run again at its own settings and at others, as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline_lab.reporting.presentation import markdown_table
from paceline_lab.simulate.policies import TARGET_ONLY, Policy
from paceline_lab.simulate.run import SimulatedRun, concurrent, simulate
from paceline_lab.simulate.trace import Trace, TracedRequest, TracedSetting

NEAR = 0.05
"""How near a simulated run comes to the one that was measured, for the simulator to be believed."""
FEWEST_REPLAYED = 2
"""Measured rounds of a request from which there is a time per token."""


@dataclass(frozen=True)
class Replay:
    """A trace run again at its own settings: tokens per second of a request behind its first round."""

    measured: float
    simulated: float

    @property
    def off(self) -> float:
        """By how much the simulated speed is off, as a share of the measured."""
        return self.simulated / self.measured - 1

    def row(self) -> dict[str, object]:
        """A table's line."""
        return {
            "measured tokens/s": round(self.measured, 2),
            "simulated tokens/s": round(self.simulated, 2),
            "off by": f"{self.off:+.1%}",
            f"within {NEAR:.0%}": "yes" if abs(self.off) <= NEAR else "no",
        }


def measured_speed(requests: Iterable[TracedRequest]) -> float:
    """Tokens per second of a request behind its first round; 0 where nothing was measured."""
    timed = [request.rounds for request in requests if len(request.rounds) >= FEWEST_REPLAYED]
    tokens = sum(each.committed for rounds in timed for each in rounds[1:])
    ms = sum(rounds[-1].at_ms - rounds[0].at_ms for rounds in timed)
    return 1e3 * tokens / ms if ms > 0 else 0.0


def replay_trace(trace: Trace) -> Replay | None:
    """Run a trace again as it was run; None: it was not measured."""
    measured = measured_speed(trace.requests)
    if not measured:
        return None
    return Replay(
        measured, simulate(trace.setting, trace.requests, own_policy(trace.setting)).decode_tokens_per_second
    )


def own_policy(setting: TracedSetting) -> Policy:
    """What a trace was run with."""
    return Policy(setting.num_draft_tokens, setting.fan_out if setting.draft.is_known else 0)


def compare(
    setting: TracedSetting, requests: Sequence[TracedRequest], policies: Sequence[Policy], sessions: Sequence[int]
) -> list[dict[str, object]]:
    """A table: goodput and the request that loses most beside target-only, for each policy at each concurrency.

    With no concurrency named, requests come as they came in the trace.
    """
    rows: list[dict[str, object]] = []
    for count in sessions or (0,):
        at_once = concurrent(requests, count) if count else tuple(requests)
        at_hand = setting.of_run(concurrency=0) if count else setting
        plain = simulate(at_hand, at_once, TARGET_ONLY)
        runs = [
            plain if policy.name == TARGET_ONLY.name else simulate(at_hand, at_once, policy) for policy in policies
        ]
        best = max(run.tokens_per_second for run in runs)
        rows += [_row(count or len(requests), run, plain, best) for run in runs]
    return rows


def comparison_text(rows: Sequence[dict[str, object]]) -> str:
    """Of `compare`."""
    return markdown_table(rows)


def _row(sessions: int, run: SimulatedRun, plain: SimulatedRun, best: float) -> dict[str, object]:
    drafted = sum(each.drafted_rounds for each in run.requests)
    accepted = sum(each.accepted for each in run.requests)
    return {
        "requests": sessions,
        "k": run.policy,
        "tokens/s": round(run.tokens_per_second, 2),
        "over target-only": run.tokens_per_second / plain.tokens_per_second,
        "of the best here": run.tokens_per_second / best,
        "worst request over target-only": run.least_over(plain),
        "accepted a drafted round": accepted / drafted if drafted else 0.0,
        "drafted rounds": drafted / run.rounds,
        "hits": sum(each.hits for each in run.requests) / run.rounds,
        "target busy": run.target_busy,
    }
