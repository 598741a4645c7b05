"""`paceline bench peers`: ours and theirs started, the contest held, the report written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.models.tokenizer import load_tokenizer
from paceline.protocol.errors import require
from paceline.protocol.proposal import NONE
from paceline.runtime.config import NOT_QUANTIZED
from paceline_lab.bench.peers.report import peers_json, peers_markdown, peers_plots
from paceline_lab.bench.peers.run import (
    Contest,
    Contestant,
    ContestPlan,
    OurContestant,
    PeerRunSettings,
    modes_of,
    run_contest,
    start_peers,
)
from paceline_lab.bench.speed.groups import MeasuredServices, running_groups
from paceline_lab.reporting.progress import progress_bar, stderr_console
from paceline_lab.reporting.reports import describe, load_average, write_report


@dataclass(frozen=True)
class Lineup:
    """Who takes part: our drafters, how many tokens they propose (None: auto), our target's bits, and peers."""

    drafters: Sequence[str]
    num_draft_tokens: int | None
    peers: Sequence[str]
    quantization: str = ""


def use_cores(cores: int) -> int:
    """Keep this process and all that it starts to some cores (0: all), and return their number.

    Raises:
        InvalidInput: more than there are, or a system without affinity.
    """
    if not hasattr(os, "sched_setaffinity"):
        require(cores == 0, "cores", cores, "0 on this system, which has no affinity")
        return os.cpu_count() or 1
    available = sorted(os.sched_getaffinity(0))
    require(0 <= cores <= len(available), "cores", cores, f"in [0, {len(available)}]")
    os.sched_setaffinity(0, available[: cores or None])
    return cores or len(available)


def measure_peers(settings: PeerRunSettings, plan: ContestPlan, lineup: Lineup, out: Path, name: str) -> Path:
    """Run the contest and write its report, whatever ends it."""
    facts = describe() | {
        "model": settings.model,
        "passes": str(plan.passes),
        "tokens of each generation": str(plan.tokens),
        "cores of every system": str(settings.threads),
        "quantization of ours": lineup.quantization or NOT_QUANTIZED,
        "files of llama-cpp": settings.precision,
        "draft of peers": settings.draft or "none",
        "peers propose": f"{settings.num_draft_tokens} tokens",
        "load average before": load_average(),
    }
    contest = Contest()
    try:
        _hold_contest(settings, plan, lineup, contest)
    finally:
        facts |= {peer: contest.facts[peer] for peer in sorted(contest.facts)}
        report = write_report(out, name, facts, peers_json(contest), peers_markdown(contest), peers_plots(contest))
    return report


def _hold_contest(settings: PeerRunSettings, plan: ContestPlan, lineup: Lineup, contest: Contest) -> None:
    console = stderr_console()
    modes = modes_of(lineup.peers, settings)
    with (
        running_groups(
            MeasuredServices(settings.model, quantization=lineup.quantization), (NONE, *lineup.drafters), console
        ) as groups,
        start_peers(modes, settings, contest, lambda line: console.print(line, style="dim")) as theirs,
    ):
        ours = [OurContestant(group, lineup.num_draft_tokens) for group in groups.values()]
        contestants: list[Contestant] = [*ours, *theirs]
        with progress_bar(console, "runs", plan.passes * len(plan.prompts) * len(contestants)) as advance:
            tokenizer = load_tokenizer(settings.model)
            run_contest(
                plan, contestants, tokenizer, contest, lambda run: advance(f"{run.kind} {run.system} {run.mode}")
            )
