"""What does distance to the draft services cost, with prefetched proposals and without?"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from paceline_lab.simulate.outcome import ClusterOutcome
from paceline_lab.simulate.processes import run_all
from paceline_lab.simulate.studies.parts import MIDDLE, Study, bars, run

ONE_WAY_MS = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
SESSIONS = 8
JITTER = 2.0
"""A delay's 99th percentile over its median."""
WAYS: Mapping[str, tuple[str, int]] = {
    "k = 4, waits for each draft": ("4", 0),
    "k = 4, drafted ahead, nothing prefetched": ("4+ahead", 0),
    "k = 4, drafted ahead and prefetched": ("4+ahead", 24),
    "auto": ("auto", 24),
}
"""By what a table calls it: `k`, and the most nodes that are left with the target."""


def study(seed: int) -> Study:
    """Run it."""
    plain = run(MIDDLE.targets(1), {"sessions": SESSIONS}, k="0", seed=seed)
    outcomes = run_all({(way, ms): partial(_at, ms, *WAYS[way], seed) for way in WAYS for ms in ONE_WAY_MS})
    rows = [_row(way, ms, each, outcomes[way, ONE_WAY_MS[0]], plain) for (way, ms), each in outcomes.items()]
    gains = {
        way: [outcomes[way, ms].tokens_per_second / plain.tokens_per_second for ms in ONE_WAY_MS] for way in WAYS
    }
    return Study(
        "study-zones",
        "What does distance to the drafts cost?",
        f"One target ({MIDDLE.target} on {MIDDLE.tensor_parallel} H100) and one draft service on an L40S; {SESSIONS} "
        f"sessions. The coordinator is 0.2 ms from the target; the delay is one way to the draft service, log-normal "
        f"with a 99th percentile of {JITTER:g} times the median.",
        "".join(f"- {_said(way, gains[way])}\n" for way in WAYS),
        rows,
        [bars("Speed over target-only by one-way delay", "times", [f"{ms:g} ms" for ms in ONE_WAY_MS], gains, 1.0)],
    )


def _at(ms: float, k: str, prefetched: int, seed: int) -> ClusterOutcome:
    drafts = MIDDLE.drafts(1, link={"ms": ms, "p99_ms": JITTER * ms})
    return run(
        MIDDLE.targets(1),
        {"sessions": SESSIONS},
        drafts=drafts,
        k=k,
        seed=seed,
        speculation={"max_prefetched": prefetched},
    )


def _row(
    way: str, ms: float, each: ClusterOutcome, nearest: ClusterOutcome, plain: ClusterOutcome
) -> dict[str, object]:
    return {
        "proposals": way,
        "one way ms": ms,
        "tokens/s": round(each.tokens_per_second, 1),
        "over target-only": round(each.tokens_per_second / plain.tokens_per_second, 3),
        f"over {ONE_WAY_MS[0]:g} ms": round(each.tokens_per_second / nearest.tokens_per_second, 3),
        "hits": f"{each.hits:.0%}",
        "started by the target": f"{each.self_started:.0%}",
        "waiting for drafts": f"{each.waiting_for_drafts:.0%}",
        "per token p99 ms": round(each.groups[0].tpot_p99_ms, 2),
    }


def _said(way: str, gains: list[float]) -> str:
    pays = [ms for ms, gain in zip(ONE_WAY_MS, gains, strict=True) if gain >= 1]
    until = f"pays up to {pays[-1]:g} ms" if pays else "pays nowhere"
    return f"{way}: {gains[0]:.2f} times target-only at {ONE_WAY_MS[0]:g} ms, {gains[-1]:.2f} at 20 ms; {until}"
