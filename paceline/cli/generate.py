"""`paceline generate`: one request, streamed in colours or as JSON."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from paceline.cli import display
from paceline.cli.app import app
from paceline.cli.display import prompt_json, prompt_table
from paceline.cli.request_options import RequestOptions, open_client, read_api_key
from paceline.cli.serve import check_models
from paceline.cli.support import example, need_engine
from paceline.client import DEFAULT_ADDRESS, Client, Collector, Generation
from paceline.local.settings import ServeSettings, local_settings
from paceline.local.supervisor import SupervisedServices
from paceline.protocol.errors import InvalidInput, require
from paceline.protocol.generation import ChatMessage, GenerateRequest, SpeculationSettings
from paceline.protocol.given_files import read_text
from paceline.protocol.proposal import AUTO, NONE, Acceptance
from paceline.protocol.sampling import Grammar, GrammarKind, SamplingParams
from paceline.runtime.config import DEFAULT_MODEL, NOT_QUANTIZED, PeerSettings
from paceline.runtime.options import takes_settings
from paceline.runtime.process import signals_interrupt
from paceline.timeline.saved import EXTENSION, ROUNDS, rounds_json


@dataclass(frozen=True)
class _RunOptions:
    """A request, and the options of `generate` beside it."""

    request: GenerateRequest
    as_json: bool
    compare: bool
    samples: int
    rounds: bool


def _models(number: str) -> str:
    return f"the model's, or {number}"


@app.command(
    epilog=example(
        'paceline generate --prompt "Once upon a time" --temperature 0.8 --seed 7',
        'paceline generate --local --chat "Name three rivers." --drafter ngram --json',
        "paceline generate --prompt-file edit.txt --prediction program.py --temperature 0 --max-new-tokens 900",
        'paceline generate --chat "Name a river." --json-schema \'{"type": "string", "maxLength": 20}\' -n 3',
    )
)
@takes_settings(RequestOptions)
def generate(
    prompt: Annotated[str | None, typer.Option(help="Plain text to go on from.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A file with that text.")] = None,
    chat: Annotated[str | None, typer.Option(help="A user message, rendered with the chat template.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message before it.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.", show_default=_models("1"))] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Keep the k most probable tokens; 0: all.", show_default=_models("0"))
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Keep the smallest set of tokens with this mass, in (0, 1].", show_default=_models("1")),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Drop tokens below this share of the largest, in [0, 1].", show_default=_models("0")),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            help="Above 1: tokens of prompt and text get less probable, in [0.01, 100].", show_default=_models("1")
        ),
    ] = None,
    presence_penalty: Annotated[
        float, typer.Option(help="Above 0: tokens of the text get less probable, in [-2, 2].")
    ] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same, once for each occurrence, in [-2, 2].")] = 0.0,
    logit_bias: Annotated[list[str] | None, typer.Option(help="ID=BIAS, in [-100, 100]; repeatable.")] = None,
    bad_words: Annotated[
        list[str] | None, typer.Option(help="Sequence of token ids ID,ID,… that the text never has; repeatable.")
    ] = None,
    min_tokens: Annotated[int, typer.Option(help="Tokens before the text may end.")] = 0,
    json_schema: Annotated[
        str | None, typer.Option(help="The text is JSON that fits this schema; @FILE reads it.")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="The text matches this expression; @FILE reads it.")] = None,
    lark: Annotated[str | None, typer.Option(help="The text is of this Lark grammar; @FILE reads it.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the generation; repeatable.")] = None,
    seed: Annotated[int | None, typer.Option(help="Fixes every draw.", show_default="drawn and reported")] = None,
    n: Annotated[int, typer.Option("--n", "-n", help="Samples of the same prompt and seed.")] = 1,
    acceptance: Annotated[
        Acceptance, typer.Option(help="Acceptance rule: coupled trusts no draft, rejection and block trust its q.")
    ] = Acceptance.COUPLED,
    drafter: Annotated[
        str | None,
        typer.Option(help="As serve names it: auto, ngram, model, model:NAME, mtp, none.", show_default="the first"),
    ] = None,
    prediction: Annotated[
        Path | None, typer.Option(help="A file with text that most of the output will repeat.")
    ] = None,
    coordinator: Annotated[str, typer.Option(help="HOST:PORT of a coordinator.")] = DEFAULT_ADDRESS,
    local: Annotated[bool, typer.Option("--local", help="Start services for this one command.")] = False,
    model: Annotated[str, typer.Option(help="With --local: the target model.")] = DEFAULT_MODEL,
    quantization: Annotated[
        str, typer.Option(help="With --local: none, or int8, the target's weights in 8 bits.")
    ] = NOT_QUANTIZED,
    tls_server_name: Annotated[
        str | None, typer.Option(help="Name in the coordinator's certificate.", show_default="the host")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per sample.")] = False,
    prompt_logprobs: Annotated[
        int | None,
        typer.Option(
            help="Show each prompt token's log-probability, and those of the N most probable ones, in [0, 20]."
        ),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Run again target-only and show both speeds.")] = False,
    rounds: Annotated[bool, typer.Option("--rounds", help="With --json: the record of every round.")] = False,
    **flags: Any,
) -> None:
    """Generate text and stream it, coloured by the origin of each token."""
    messages = _messages(prompt, prompt_file, chat, system)
    shared = RequestOptions(**flags)
    require(not (compare and (as_json or n > 1)), "compare", compare, "left out with --json and --n")
    require(as_json or not rounds, "rounds", rounds, "given with --json only")
    numbers: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    request = GenerateRequest(
        prompt=read_text("prompt_file", prompt_file) if prompt_file else prompt,
        messages=messages,
        sampling=SamplingParams(
            **{name: number for name, number in numbers.items() if number is not None},
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=tuple(_bias(entry) for entry in logit_bias or ()),
            bad_words=tuple(_word(entry) for entry in bad_words or ()),
            min_tokens=min_tokens,
            grammar=_grammar(json_schema, regex, lark),
        ),
        seed=seed,
        max_new_tokens=shared.max_new_tokens,
        stop=tuple(stop or ()),
        prompt_logprobs=prompt_logprobs,
        acceptance=acceptance,
        prediction_text=read_text("prediction", prediction) if prediction else "",
        # The services that --local starts have one drafter, whatever its name.
        speculation=SpeculationSettings(
            drafter=drafter if drafter and not (local and drafter != NONE) else "",
            num_draft_tokens=shared.draft_tokens,
        ),
    )
    options = _RunOptions(request, as_json, compare, n, rounds)
    if local:
        settings = local_settings(model, drafter or AUTO, quantization)
        with signals_interrupt(), _local_services(settings, quiet=as_json) as services:
            _generate_at(services.reach("coordinator"), None, shared.timeout, options)
    else:
        peer = shared.peer(coordinator, tls_server_name)
        _generate_at(peer, read_api_key(shared.api_key_file), shared.timeout, options)


def _messages(
    prompt: str | None, prompt_file: Path | None, chat: str | None, system: str | None
) -> tuple[ChatMessage, ...]:
    count = sum(value is not None for value in (prompt, prompt_file, chat))
    require(count == 1, "inputs given", count, "exactly 1 of --prompt, --prompt-file and --chat")
    require(system is None or chat is not None, "system", system, "given with --chat only")
    require(chat != "", "chat", chat, "at least 1 character")
    if chat is None:
        return ()
    system_message = () if system is None else (ChatMessage("system", system),)
    return (*system_message, ChatMessage("user", chat))


def _bias(entry: str) -> tuple[int, float]:
    token_id, _, bias = entry.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError as error:
        raise InvalidInput.of("logit_bias", entry, "ID=BIAS") from error


def _word(entry: str) -> tuple[int, ...]:
    try:
        return tuple(int(token_id) for token_id in entry.split(","))
    except ValueError as error:
        raise InvalidInput.of("bad_words", entry, "token ids, ID,ID,…") from error


def _grammar(json_schema: str | None, regex: str | None, lark: str | None) -> Grammar | None:
    texts = {GrammarKind.JSON_SCHEMA: json_schema, GrammarKind.REGEX: regex, GrammarKind.LARK: lark}
    grammars = {kind: text for kind, text in texts.items() if text is not None}
    require(len(grammars) <= 1, "grammars given", len(grammars), "at most 1 of --json-schema, --regex and --lark")
    for kind, text in grammars.items():
        return Grammar(kind, read_text(kind.value, Path(text[1:])) if text.startswith("@") else text)
    return None


@contextlib.contextmanager
def _local_services(settings: ServeSettings, *, quiet: bool) -> Iterator[SupervisedServices]:
    need_engine("generate --local")
    check_models(settings)

    def announce(line: str) -> None:
        if not quiet:
            typer.echo(line, err=True)

    with (
        tempfile.TemporaryDirectory(prefix="paceline-") as folder,
        SupervisedServices(settings, Path(folder), announce, keeps_logs=False) as running,
    ):
        yield running


def _generate_at(peer: PeerSettings, api_key: str | None, timeout_s: float | None, options: _RunOptions) -> None:
    with open_client(peer, api_key, timeout_s) as client:
        if options.samples == 1 and not options.as_json:
            _stream(client, options)
            return
        for generation in client.generate_samples(options.samples, options.request):
            if options.as_json:
                document = display.generation_json(generation) | prompt_json(generation)
                if options.rounds:
                    document[EXTENSION] = {ROUNDS: rounds_json(generation.stats.records)}
                typer.echo(json.dumps(document, ensure_ascii=False))
            else:
                typer.echo(f"--- sample {generation.sample_index}, seed {generation.seed}\n{generation.text}")
                if generation.prompt_logprobs:
                    Console().print(prompt_table(generation))


def _stream(client: Client, options: _RunOptions) -> None:
    console = Console()
    console.print(display.legend())
    ours = _show_stream(client, options.request, console)
    if ours.prompt_logprobs:
        console.print(prompt_table(ours))
    console.print(display.stats_table(ours.stats, ours.seed))
    if options.compare:
        off = SpeculationSettings(off=True)
        plain = client.generate(replace(options.request, seed=ours.seed, speculation=off, prompt_logprobs=None))
        console.print(display.comparison(ours, plain))


def _show_stream(client: Client, request: GenerateRequest, console: Console) -> Generation:
    screen, collector = display.StreamDisplay(console), Collector()
    for event in client.stream(request):
        screen.show(event)
        collector.add(event)
    return collector.generation()
