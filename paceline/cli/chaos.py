"""`paceline chaos`: faults on one's own deployment, under load, and whether a text was lost or changed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.chaos.operating import OperatorLoad, OperatorOutcome, operate
from paceline.chaos.operation import InPath, Operation, OperatorFault, fault_commands, operator_plan
from paceline.cli.app import EXIT_ERROR, app
from paceline.cli.one_request import Temperature, Url
from paceline.cli.support import (
    ApiKeyFile,
    TlsCa,
    TlsCertificate,
    TlsKey,
    example,
    need_benchmarks,
    read_api_key,
)
from paceline.client import DEFAULT_ADDRESS
from paceline.protocol.generation import GenerateRequest
from paceline.protocol.sampling import SamplingParams
from paceline.runtime.config import PeerSettings

PROMPTS = ("Name three rivers.", "Once upon a time", "1, 2, 3, 4,", "The keeper lit the lamp and")
EPILOG = example(
    "paceline chaos --faults 20                       # says what it would do",
    "paceline chaos --faults 20 --run --out reports",
    "paceline chaos --proxy target@127.0.0.1:7053=127.0.0.1:50053 --run",
    "paceline chaos --fault-command 'kubectl delete pod {pod}' --fault-value pod=paceline-target-0 --run",
)


@app.command(epilog=EPILOG)
def chaos(
    url: Url = DEFAULT_ADDRESS,
    faults: Annotated[int, typer.Option(help="How many.", min=1, max=100_000)] = 20,
    seed: Annotated[int, typer.Option(help="Decides every fault.", min=0)] = 1,
    run: Annotated[bool, typer.Option("--run", help="Do it; else it is only said what would be done.")] = False,
    proxy: Annotated[
        list[str] | None,
        typer.Option(help="ROLE@LISTEN=UPSTREAM: stand before a target or draft; the coordinator must dial LISTEN."),
    ] = None,
    fault_command: Annotated[
        list[str] | None, typer.Option(help="Runs as a fault; {NAME} is a --fault-value. No shell reads it.")
    ] = None,
    fault_value: Annotated[list[str] | None, typer.Option(help="NAME=VALUE; repeatable, for each of them.")] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Runs while faults fall; repeatable: all at once.", show_default="four")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Of each of them.", min=1)] = 64,
    temperature: Temperature = 0.8,
    patience: Annotated[float, typer.Option(help="Seconds after which a request hangs.", min=1)] = 120.0,
    out: Annotated[Path | None, typer.Option(help="Folder of the report.", show_default="shown only")] = None,
    tls_ca: TlsCa = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    api_key_file: ApiKeyFile = None,
) -> None:
    """Inject faults into a deployment under load, and see that no text is lost or changed; exit code 1: one was."""
    operation = Operation(
        tuple(InPath.parse(each) for each in proxy or ()),
        fault_commands(fault_command or (), fault_value or ()),
        tls=tls_ca is not None,
    )
    planned = operator_plan(operation, seed, faults)
    if not run:
        _say(operation, url, planned)
        return
    need_benchmarks("chaos --run")
    peer = PeerSettings(address=url, tls_ca=tls_ca, tls_certificate=tls_certificate, tls_key=tls_key)
    requests = tuple(
        GenerateRequest(
            prompt=each, seed=place, max_new_tokens=max_new_tokens, sampling=SamplingParams(temperature=temperature)
        )
        for place, each in enumerate(prompt or PROMPTS)
    )
    load = OperatorLoad(peer, requests, read_api_key(api_key_file), patience)
    outcomes = asyncio.run(_all(operation, load, planned))
    typer.echo(_report(outcomes, out, seed))
    if any(each.lost or each.changed or each.whole_s is None for each in outcomes):
        raise typer.Exit(EXIT_ERROR)


def _say(operation: Operation, url: str, planned: Sequence[OperatorFault]) -> None:
    """What would be done, and what it takes."""
    typer.echo(f"Requests would go to {url} through a proxy of this program, and one after the other:")
    for number, fault in enumerate(planned, 1):
        typer.echo(f"{number:4}. {fault.told}")
    for each in operation.proxies:
        (host, port), (upstream, upstream_port) = each.listen, each.upstream
        typer.echo(f"Configure the coordinator first: --{each.role} {host}:{port} for {upstream}:{upstream_port}")
    typer.echo("Nothing was done: --run does it.")


async def _all(operation: Operation, load: OperatorLoad, planned: Sequence[OperatorFault]) -> list[OperatorOutcome]:
    outcomes = []
    async for outcome in operate(operation, load, planned):
        outcomes.append(outcome)
        typer.echo(f"{len(outcomes):4}. {outcome.fault.told}: {_in_words(outcome)}", err=True)
    return outcomes


def _in_words(outcome: OperatorOutcome) -> str:
    if not outcome.struck:
        return "its message did not come"
    wrong = [*(f"lost {each}" for each in outcome.lost), *(f"changed {each}" for each in outcome.changed)]
    if outcome.whole_s is None:
        wrong.append("the coordinator lacks a peer")
    return ", ".join(wrong) or "nothing lost, nothing changed"


def _report(outcomes: Sequence[OperatorOutcome], out: Path | None, seed: int) -> str:
    """Markdown; with a folder it is written there, beside its JSON."""
    from benchmarks.reporting.presentation import markdown_table
    from benchmarks.reporting.reports import describe, write_report

    struck = [each for each in outcomes if each.struck]
    kinds = sorted({each.fault.kind.value for each in struck})
    rows = [_row(kind, [each for each in struck if each.fault.kind.value == kind]) for kind in kinds]
    missed = len(outcomes) - len(struck)
    text = f"# Chaos\n\n{markdown_table(rows)}\n{missed} faults met no message of their state and don't count.\n"
    text += "".join(
        f"\n- seed {each.fault.seed}: {each.fault.told}: {_in_words(each)}" for each in struck if _bad(each)
    )
    if out is None:
        return text
    values = {"results": [_plain(asdict(each)) for each in outcomes]}
    return f"{text}\nreport: {write_report(out, 'chaos', describe() | {'seed': str(seed)}, values, text)}"


def _row(kind: str, outcomes: Sequence[OperatorOutcome]) -> dict[str, object]:
    from benchmarks.reporting.figures import percentile

    row: dict[str, object] = {"kind": kind, "faults": len(outcomes)}
    row |= {name: sum(len(getattr(each, name)) for each in outcomes) for name in ("lost", "changed")}
    for name, title in (("recover_s", "next token"), ("whole_s", "all linked")):
        took = [1e3 * value for each in outcomes if (value := getattr(each, name)) is not None]
        row |= {f"{title} p{percent}, ms": f"{percentile(took, percent):.0f}" for percent in (50, 99)}
    return row


def _bad(outcome: OperatorOutcome) -> bool:
    return bool(outcome.lost or outcome.changed or outcome.whole_s is None)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Enums by their values, for JSON."""
    fault = {name: getattr(value, "value", value) for name, value in values["fault"].items()}
    return values | {"fault": fault}
