"""`paceline plan`: what drafting would bring on one's own texts, before anything is deployed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from paceline.cli.request_options import RoleTlsOptions
from paceline.cli.support import example, split_commas
from paceline.protocol.errors import require
from paceline.runtime.config import DEFAULT_MODEL, EngineSettings, load_config
from paceline.runtime.options import takes_settings
from paceline.runtime.roles import PeerRole
from paceline_lab.commands.extras import need_benchmarks, numbers, whole_numbers

if TYPE_CHECKING:
    from paceline.costs.cost_line import CostLine
    from paceline_lab.predict.services import ServicesOptions

commands = typer.Typer()
EPILOG = example(
    "paceline plan smollm2-135m --sample prompts.jsonl",
    "paceline plan qwen2.5-coder-1.5b --drafter qwen2.5-coder-0.5b --drafter smollm2-135m --sample logs.jsonl",
    "paceline plan TARGET --drafter NAME --sample logs.jsonl --gpu h100 --tp 4 --draft-gpu l4 --traffic 5000 "
    "--target-price 40 --draft-price 0.8",
    "paceline plan smollm2-135m --sample prompts.jsonl --target-url HOST:PORT --draft-url HOST:PORT",
)


@commands.command(epilog=EPILOG)
@takes_settings(EngineSettings, only=("threads", "device", "dtype", "trust_remote_code"))
@takes_settings(RoleTlsOptions)
def plan(
    sample: Annotated[
        Path,
        typer.Option(
            help="Your prompts, texts or logs: JSONL with prompt, messages or text; or a trace of running services."
        ),
    ],
    target: Annotated[
        str, typer.Argument(help="The model that will be served.", show_default=f"{DEFAULT_MODEL}, or a trace's")
    ] = "",
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="A draft: model:NAME or NAME, folder, default, mtp; repeatable.", show_default="what auto serves"
        ),
    ] = None,
    target_url: Annotated[
        str, typer.Option(help="HOST:PORT of a running target that reads the texts.", show_default="this machine")
    ] = "",
    draft_url: Annotated[
        list[str] | None, typer.Option(help="HOST:PORT of its draft service; repeatable.", show_default="none")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the report and of the work behind it.")] = Path("plan"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the folder's work.")] = False,
    temperature: Annotated[str, typer.Option(help="Temperatures, with commas between.")] = "0,0.8",
    k: Annotated[
        str, typer.Option(help="Tokens proposed, with commas between; DEPTH:WIDTH-WIDTH is a static tree.")
    ] = "1,2,3,4,6,8,4:2,4:3-2",
    sessions: Annotated[str, typer.Option(help="Requests at once, with commas between.")] = "1",
    texts: Annotated[int, typer.Option(help="Most texts, spread evenly over the sample.")] = 16,
    answer_tokens: Annotated[int, typer.Option(help="Most tokens of each answer.")] = 128,
    seed: Annotated[int, typer.Option(help="Of the target's draws.")] = 0,
    target_line: Annotated[
        str, typer.Option(help="ROWS:MS, with commas between: a target step.", show_default="measured here")
    ] = "",
    draft_line: Annotated[
        list[str] | None,
        typer.Option(help="[NAME=]ROWS:MS,…: a drafter's step; repeatable.", show_default="measured here"),
    ] = None,
    gpu: Annotated[str, typer.Option(help="Model the target's steps for this GPU.", show_default="none")] = "",
    tp: Annotated[int, typer.Option(help="GPUs that share the target there.")] = 1,
    weights: Annotated[str, typer.Option(help="The target's there: bf16, 8-bit, 4-bit.")] = "bf16",
    target_size: Annotated[
        str, typer.Option(help="Model this size instead: a known one or a config.json.", show_default="the target's")
    ] = "",
    draft_gpu: Annotated[str, typer.Option(help="Model drafts on a GPU of their own.", show_default="none")] = "",
    draft_size: Annotated[str, typer.Option(help="As --target-size.", show_default="the drafter's")] = "",
    context: Annotated[int, typer.Option(help="Tokens of each request that modelled steps read.")] = 1024,
    target_trip_ms: Annotated[float, typer.Option(help="To the target and back.")] = 1.0,
    draft_trip_ms: Annotated[float, typer.Option(help="To the draft service and back.")] = 1.0,
    apart: Annotated[bool, typer.Option("--apart", help="Drafts have hardware of their own.")] = False,
    traffic: Annotated[float, typer.Option(help="Tokens per second to be served; 0: not stated.")] = 0.0,
    target_price: Annotated[float, typer.Option(help="Of one target an hour, all its GPUs.")] = 0.0,
    draft_price: Annotated[float, typer.Option(help="Of one draft service an hour.")] = 0.0,
    **flags: object,
) -> None:
    """Predict acceptance, speed and cost of drafters on your texts, and recommend a setting, or none."""
    need_benchmarks("plan")
    tls_flags = {name: flags.pop(name) for name in RoleTlsOptions.model_fields.keys() & flags.keys()}
    tls = RoleTlsOptions.model_validate(tls_flags)
    engine = load_config(EngineSettings, None, flags)
    from paceline.costs.cost_line import CostLine
    from paceline_lab.plan.options import PlanOptions, TimesOptions, drafters_named
    from paceline_lab.plan.report import console_lines, write_plan
    from paceline_lab.plan.run import make_plan
    from paceline_lab.plan.traces import target_of
    from paceline_lab.predict.prices import Prices
    from paceline_lab.predict.rounds import ProposalShape
    from paceline_lab.predict.sample import SampleOptions

    target = target_of(sample, target) or target or DEFAULT_MODEL
    services = _services(target_url, draft_url or [], drafter or [], tls)
    options = PlanOptions(
        target=target,
        sample=SampleOptions(sample, numbers("temperature", temperature), texts, answer_tokens, seed),
        out=out,
        drafters=() if services else drafters_named(drafter or [], target),
        shapes=tuple(ProposalShape.parse(each) for each in split_commas(k)),
        loads=whole_numbers("sessions", sessions),
        times=TimesOptions(
            target_line=CostLine.parse("target_line", target_line),
            draft_lines=_draft_lines(draft_line or []),
            gpu=gpu,
            draft_gpu=draft_gpu,
            tensor_parallel=tp,
            weights=weights,
            target_size=target_size,
            draft_size=draft_size,
            context=context,
            target_trip_ms=target_trip_ms,
            draft_trip_ms=draft_trip_ms,
            apart=apart,
        ),
        prices=Prices(target_price, draft_price, traffic, target_gpus=tp),
        resume=resume,
        engine=engine,
        services=services,
    )
    plan_result = make_plan(options, Console(stderr=True, soft_wrap=True))
    page = write_plan(plan_result)
    for line in console_lines(plan_result):
        typer.echo(line)
    typer.echo(f"written: {page} and {page.with_suffix('.md').name} beside it")


def _services(target: str, drafts: list[str], drafters: list[str], tls: RoleTlsOptions) -> ServicesOptions | None:
    """Return the running services that read the texts; None: this machine reads them."""
    from paceline_lab.predict.services import ServicesOptions

    if not target:
        limit = "left out without --target-url"
        require(not drafts, "draft_url", drafts, limit)
        require(tls == RoleTlsOptions(), "tls", "given", limit)
        return None
    draft_peers = tuple(tls.peer_of(PeerRole.DRAFT, each) for each in drafts)
    return ServicesOptions(tls.peer_of(PeerRole.TARGET, target), draft_peers, tuple(drafters))


def _draft_lines(texts: list[str]) -> dict[str, CostLine]:
    from paceline.costs.cost_line import CostLine

    pairs = [text.rpartition("=") for text in texts]
    return {name: CostLine.parse("draft_line", line) for name, _, line in pairs}
