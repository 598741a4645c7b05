"""`paceline branches`: where a draft parts from its target, on a sample of the user's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paceline.cli.support import example
from paceline.runtime.config import DEFAULT_MODEL, EngineSettings, load_config
from paceline.runtime.options import takes_settings
from paceline_lab.commands.extras import need_benchmarks, numbers

commands = typer.Typer()
EPILOG = example(
    "paceline branches smollm2-135m --sample prompts.jsonl",
    "paceline train draft --out better --data prompts.jsonl --init default --focus branches/branches.json",
)


@commands.command(epilog=EPILOG)
@takes_settings(EngineSettings, only=("threads", "device", "dtype", "trust_remote_code"))
def branches(
    sample: Annotated[Path, typer.Option(help="Your prompts, texts or logs: JSONL with prompt, messages or text.")],
    target: Annotated[str, typer.Argument(help="The model that is drafted for.")] = DEFAULT_MODEL,
    drafter: Annotated[str, typer.Option(help="The draft: model:NAME or NAME, folder, default, mtp.")] = "default",
    out: Annotated[Path, typer.Option(help="Folder of the reports and of the work behind them.")] = Path("branches"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the folder's work, or a plan's.")] = False,
    temperature: Annotated[str, typer.Option(help="Temperatures, with commas between.")] = "0",
    texts: Annotated[int, typer.Option(help="Most texts, spread evenly over the sample.")] = 16,
    answer_tokens: Annotated[int, typer.Option(help="Most tokens of each answer.")] = 128,
    seed: Annotated[int, typer.Option(help="Of the target's draws.")] = 0,
    **flags: object,
) -> None:
    """Tell where draft and target part: kinds of text, choices, places; as JSON, Markdown and a page.

    `paceline train KIND --focus` reads the JSON.
    """
    need_benchmarks("branches")
    engine = load_config(EngineSettings, None, flags)
    from paceline_lab.plan.branches import kind_rows, summary, write_branching
    from paceline_lab.plan.options import PlanOptions, drafters_named
    from paceline_lab.plan.readers import load_readers
    from paceline_lab.plan.run import read_all
    from paceline_lab.plan.traces import require_texts
    from paceline_lab.predict.branching import branching
    from paceline_lab.predict.reading import shown_name
    from paceline_lab.predict.sample import SampleOptions
    from paceline_lab.reporting.presentation import markdown_table
    from paceline_lab.reporting.reports import describe
    from paceline_training.text_kinds import TextKinds

    require_texts(sample)
    options = PlanOptions(
        target=target,
        sample=SampleOptions(sample, numbers("temperature", temperature), texts, answer_tokens, seed),
        out=out,
        drafters=drafters_named([drafter], target),
        resume=resume,
        engine=engine,
    )
    readers = load_readers(options)
    read = read_all(options, readers, Console(stderr=True, soft_wrap=True))
    (name,) = readers.models
    report = branching(read, name, TextKinds(readers.tokenizer))
    facts = {
        "target": shown_name(target),
        "drafter": name,
        "tokenizer": readers.tokenizer.fingerprint,
        "sample": f"{sample.name}, {len(read)} readings at temperature {temperature}, seed {seed}",
        **describe(),
    }
    files = write_branching(out, report, facts)
    typer.echo(f"{summary(report)}\n\n{markdown_table(kind_rows(report))}")
    typer.echo(f"written: {', '.join(map(str, files))}")
