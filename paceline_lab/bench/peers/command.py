"""`paceline bench peers`: ours and theirs started, the contest held, the report written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.engine.llama.loading import LLAMA, at_hand, row_bytes
from paceline.models.gguf_header import read_header
from paceline.models.tokenizer import load_tokenizer
from paceline.protocol.errors import require
from paceline.protocol.proposal import AUTO, MODEL, NONE
from paceline.runtime.config import NOT_QUANTIZED
from paceline.runtime.llama_settings import LlamaSettings
from paceline_lab.bench.peers.install import llama_library
from paceline_lab.bench.peers.models import gguf_of
from paceline_lab.bench.peers.report import peers_json, peers_markdown, peers_plots
from paceline_lab.bench.peers.run import (
    OURS,
    REPRODUCIBLE,
    Contest,
    Contestant,
    ContestPlan,
    OurContestant,
    run_contest,
)
from paceline_lab.bench.peers.starting import PeerRunSettings, modes_of, start_peers
from paceline_lab.bench.peers.worker import CONTEXT_TOKENS
from paceline_lab.bench.speed.groups import MeasuredServices, running_groups
from paceline_lab.reporting.progress import progress_bar, stderr_console
from paceline_lab.reporting.reports import describe, load_average, write_report

_SPARE_ROWS = 256
"""Cells of a user's tree beside those of a text, and so many that llama.cpp's rounding costs none."""


@dataclass(frozen=True)
class Lineup:
    """Who takes part.

    Attributes:
        drafters: ours.
        num_draft_tokens: how many tokens they propose; None: auto.
        quantization: our target's bits.
        engine: what computes ours; llama: the file that llama-cpp reads, with its library if it is installed.
        reproducible: ours take part in reproducible mode, too.
    """

    drafters: Sequence[str]
    num_draft_tokens: int | None
    peers: Sequence[str]
    quantization: str = ""
    engine: str = AUTO
    reproducible: bool = False

    @property
    def on_llama(self) -> bool:
        """Whether llama.cpp computes ours."""
        return self.engine == LLAMA


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
        if lineup.on_llama:  # at last: the library sets variables that peers would inherit
            facts["llama.cpp of ours"] = at_hand(LlamaSettings(library=llama_library(settings.home)))
        report = write_report(out, name, facts, peers_json(contest), peers_markdown(contest), peers_plots(contest))
    return report


def _hold_contest(settings: PeerRunSettings, plan: ContestPlan, lineup: Lineup, contest: Contest) -> None:
    console = stderr_console()
    modes = modes_of(lineup.peers, settings)
    with (
        _start_ours(settings, lineup, console) as ours,
        start_peers(modes, settings, contest, lambda line: console.print(line, style="dim")) as theirs,
    ):
        contestants: list[Contestant] = [*ours, *theirs]
        with progress_bar(console, "runs", len([*plan.waves()]) * len(contestants)) as advance:
            tokenizer = load_tokenizer(settings.model)
            run_contest(
                plan, contestants, tokenizer, contest, lambda run: advance(f"{run.kind} {run.system} {run.mode}")
            )


@contextmanager
def _start_ours(settings: PeerRunSettings, lineup: Lineup, console: Console) -> Iterator[list[OurContestant]]:
    services, drafters = _our_services(settings, lineup)
    systems = {OURS: services}
    if lineup.reproducible:
        systems[REPRODUCIBLE] = replace(services, options={**services.options, "reproducible": True})
    with ExitStack() as stack:
        yield [
            OurContestant(group, lineup.num_draft_tokens, system, group.start_s)
            for system, each in systems.items()
            for group in stack.enter_context(running_groups(each, (NONE, *drafters), console)).values()
        ]


def _our_services(settings: PeerRunSettings, lineup: Lineup) -> tuple[MeasuredServices, Sequence[str]]:
    """Our services without prefix caches, and their drafters; on llama.cpp with the peer's files and cache."""
    environment = {f"PACELINE_{service}_ENGINE__PREFIX_REUSE": "false" for service in ("TARGET", "DRAFT")}
    options: dict[str, Any] = {} if lineup.engine == AUTO else {"engine": lineup.engine}
    if not lineup.on_llama:
        services = MeasuredServices(settings.model, None, lineup.quantization, options, environment)
        return services, lineup.drafters
    library = LlamaSettings(library=llama_library(settings.home))
    options |= {"llama": library, "max_model_len": CONTEXT_TOKENS}
    files = {"TARGET": gguf_of(settings.model, settings.precision, settings.home)}
    drafters = lineup.drafters
    if settings.draft is not None:
        files["DRAFT"] = gguf_of(settings.draft, settings.precision, settings.home)
        options["draft_engine"] = LLAMA
        drafters = [f"{one}:{files['DRAFT']}" if one in (AUTO, MODEL) else one for one in drafters]
    cells = settings.users * (CONTEXT_TOKENS + _SPARE_ROWS)
    for service, file in files.items():
        environment[f"PACELINE_{service}_ENGINE__KV_BYTES"] = str(cells * row_bytes(read_header(file), library))
    return MeasuredServices(str(files["TARGET"]), None, lineup.quantization, options, environment), drafters
