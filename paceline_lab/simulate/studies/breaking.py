"""What breaks first as load grows, and when a service fails under load?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline_lab.simulate.outcome import ClusterOutcome
from paceline_lab.simulate.studies.parts import ROUND_MS, SMALL, Study, bars, run

RATES = (4, 16, 40)
"""Requests per second of a cell."""
CELLS: Mapping[str, Mapping[str, Any]] = {
    "one coordinator": {"coordinators": {"count": 1, "round_ms": ROUND_MS, "max_requests": 4096}},
    "four coordinators": {"coordinators": {"count": 4, "round_ms": ROUND_MS, "max_requests": 4096}},
    "four coordinators, long prompts": {"coordinators": {"count": 4, "round_ms": ROUND_MS, "max_requests": 4096}},
}
LONG = {"prompt_tokens": {"median": 6000, "p99": 24000}}
FAILURES: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "nothing fails": (),
    "a draft fails": ({"service": "draft", "at_seconds": 4.0, "down_seconds": 1.0},),
    "a target fails": ({"service": "target", "at_seconds": 4.0, "down_seconds": 1.0},),
    "a coordinator fails": ({"service": "coordinator", "at_seconds": 4.0, "down_seconds": 1.0},),
}
FAILING_RATE = 8


def study(seed: int) -> Study:
    """Run it."""
    outcomes = {(cell, rate): _grown(cell, rate, seed) for cell in CELLS for rate in RATES}
    failed = {what: _failing(what, seed) for what in FAILURES}
    rows = [_row(cell, rate, each) for (cell, rate), each in outcomes.items()]
    rows += [_row(f"four coordinators, {what}", FAILING_RATE, each) for what, each in failed.items()]
    tails = {cell: [outcomes[cell, rate].groups[0].tpot_p99_ms for rate in RATES] for cell in CELLS}
    return Study(
        "study-breaking",
        "What breaks first?",
        f"Two targets ({SMALL.target} on an H100 each), one draft service on an L40S, `auto`, Poisson arrivals, "
        f"prompts of 300 tokens in the median or, where long, 6000. A coordinator takes {ROUND_MS:g} ms a round. "
        "Failures at 4 s of 6, for a second; a lost target's sessions compute their texts again elsewhere.",
        "".join(f"- {_said(cell, {rate: outcomes[cell, rate] for rate in RATES})}\n" for cell in CELLS)
        + "".join(f"- {_said_failure(what, each)}\n" for what, each in failed.items()),
        rows,
        [bars("Per token p99 by requests per second", "milliseconds", [str(rate) for rate in RATES], tails)],
    )


def _grown(cell: str, rate: float, seed: int) -> ClusterOutcome:
    traffic: dict[str, Any] = {"requests_per_second": rate} | (LONG if cell.endswith("long prompts") else {})
    return run(SMALL.targets(2), traffic, drafts=SMALL.drafts(1), seed=seed, **CELLS[cell])


def _failing(what: str, seed: int) -> ClusterOutcome:
    traffic = {"requests_per_second": FAILING_RATE}
    cell = CELLS["four coordinators"]
    return run(SMALL.targets(2), traffic, drafts=SMALL.drafts(1), seed=seed, failures=[*FAILURES[what]], **cell)


def _row(cell: str, rate: float, each: ClusterOutcome) -> dict[str, object]:
    (group,) = each.groups
    return {
        "cell": cell,
        "requests/s": rate,
        "tokens/s": round(each.tokens_per_second, 1),
        "first token p99 ms": round(group.ttft_p99_ms, 1),
        "per token p50 ms": round(group.tpot_p50_ms, 2),
        "per token p99 ms": round(group.tpot_p99_ms, 2),
        "refused": group.refused,
        "unfinished": group.unfinished,
        "lost sessions": each.lost_sessions,
        "targets busy": f"{each.target_busy:.0%}",
        "drafts busy": f"{each.draft_busy:.0%}",
        "coordinators busy": f"{each.coordinator_busy:.0%}",
        "KV reserved": f"{each.kv_share:.0%}",
        "bottleneck": each.bottleneck,
    }


def _said(cell: str, by_rate: Mapping[float, ClusterOutcome]) -> str:
    bound = [
        f"at {rate:g} requests per second {each.bottleneck}"
        for rate, each in by_rate.items()
        if not each.bottleneck.startswith("none")
    ]
    return f"{cell}: {'; '.join(bound) or f'nothing up to {max(by_rate):g} requests per second'}"


def _said_failure(what: str, each: ClusterOutcome) -> str:
    (group,) = each.groups
    lost = group.refused + group.unfinished
    moved = f"{lost} of {group.requests} requests lost, {each.lost_sessions} sessions went on elsewhere"
    return f"{what}: {moved}, per token p99 {group.tpot_p99_ms:.1f} ms"
