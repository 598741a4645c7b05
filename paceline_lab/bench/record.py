"""`paceline bench record`: requests run against services, and written as a trace."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from coordinator.recorder import FILE
from paceline.client import AsyncClient, Generation
from paceline.costs.acceptance import FAN_OUT
from paceline.local.settings import ServeSettings, local_settings
from paceline.local.supervisor import SupervisedServices
from paceline.protocol.errors import require
from paceline.protocol.generation import GenerateRequest
from paceline.protocol.given_files import read_json_lines
from paceline.protocol.proposal import COPYING
from paceline_lab.bench.prompts import Prompt
from paceline_lab.reporting.progress import measuring, stderr_console
from paceline_lab.reporting.reports import describe
from paceline_lab.simulate.measured import measured_setting
from paceline_lab.simulate.policies import speculation_of
from paceline_lab.simulate.trace import Trace, TracedRequest, TracedRound, number_anew, write_trace

MAX_SESSIONS = 256
"""The number of requests that a coordinator takes by default."""


@dataclass(frozen=True)
class RecordPlan:
    """A plan of requests.

    Attributes:
        prompts: prompts whose first chats are sent, again and again until there are `requests`.
        sessions: requests that run at once; the next begins when one has ended.
        num_draft_tokens: tokens of a proposal; 0: drafting is off; None: the coordinator plans.
        fan_out: the coordinator's fan-out; its other settings are its defaults.
        notes: more that the trace is to say of itself.
    """

    prompts: Sequence[Prompt]
    requests: int = 8
    sessions: int = 1
    tokens: int = 128
    temperature: float = 0.0
    num_draft_tokens: int | None = None
    seed: int = 0
    fan_out: int = FAN_OUT
    notes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(bool(self.prompts), "prompts", self.prompts, "one or more")
        require(self.requests >= 1, "requests", self.requests, "at least 1")
        require(1 <= self.sessions <= MAX_SESSIONS, "sessions", self.sessions, f"in [1, {MAX_SESSIONS}]")
        require(self.tokens >= 2, "tokens", self.tokens, "at least 2, to have a time per output token")

    def request(self, number: int) -> GenerateRequest:
        """Return the request of a number."""
        prompt, speculation = self.prompts[number % len(self.prompts)], speculation_of(self.num_draft_tokens)
        seed = self.seed + number
        return prompt.request(self.tokens, temperature=self.temperature, seed=seed, speculation=speculation)


@dataclass(frozen=True)
class RecordedGeneration:
    """A generation, and when its request was sent, seconds."""

    sent_s: float
    generation: Generation


def record_trace(model: str, drafter: str, plan: RecordPlan, out: Path, cores: str | None = None) -> Trace:
    """Run the plan on services of its own and write the trace. `cores`: as `paceline serve` takes them.

    Raises:
        PacelineError: as the services sent it.
    """
    with (
        measuring("requests", plan.requests) as (folder, advance),
        _recording(local_settings(model, drafter, cores=cores), plan, folder) as address,
    ):
        requests = [plan.request(number) for number in range(plan.requests)]
        runs = asyncio.run(run_requests(address, requests, plan.sessions, advance))
        recordings = read_recordings(folder / FILE)
    notes = describe() | {"model": model, "drafter": drafter, "sessions": str(plan.sessions)}
    notes |= {"cores": cores} if cores else {}
    notes |= {"temperature": f"{plan.temperature:g}", **plan.notes}
    trace = trace_of(
        runs,
        recordings,
        num_draft_tokens=plan.num_draft_tokens,
        concurrency=plan.sessions,
        notes=notes,
        fan_out=plan.fan_out,
    )
    write_trace(out, trace)
    return trace


@contextmanager
def _recording(settings: ServeSettings, plan: RecordPlan, folder: Path) -> Iterator[str]:
    """Run services, and beside them a coordinator that records."""
    console = stderr_console()
    announce: Callable[[str], None] = lambda line: console.print(line, style="dim")  # noqa: E731
    with (
        SupervisedServices(settings, folder / "services", announce) as services,
        services.coordinator("recording", {"record_to": str(folder), "fan_out": plan.fan_out}) as address,
    ):
        yield address


async def run_requests(
    address: str, requests: Sequence[GenerateRequest], sessions: int, advance: Callable[[str], None]
) -> list[RecordedGeneration]:
    """Run requests in their order, `sessions` of them at once."""
    numbers = iter(range(len(requests)))
    generations: dict[int, RecordedGeneration] = {}

    async def work(client: AsyncClient) -> None:
        for number in numbers:
            sent_s = time.perf_counter()
            generations[number] = RecordedGeneration(sent_s, await client.generate(requests[number]))
            advance(f"request {number}")

    async with AsyncClient(address) as client:
        await asyncio.gather(*(work(client) for _ in range(sessions)))
    return [generations[number] for number in sorted(generations)]


def read_recordings(file: Path) -> dict[int, dict[str, Any]]:
    """Return the coordinator's recording of each request, by seed; empty if it recorded none."""
    recordings: dict[int, dict[str, Any]] = {}
    for where, value in read_json_lines("record_to", file) if file.exists() else ():
        has_seed = isinstance(value, dict) and type(value.get("seed")) is int
        require(has_seed, where, value, "a JSON object with a seed")
        recordings[value["seed"]] = value
    return recordings


def trace_of(runs: Sequence[RecordedGeneration], recordings: Mapping[int, Mapping[str, Any]], **of_run: Any) -> Trace:
    """Return the trace of generations that have ended; `of_run` has other fields of its `TracedSetting`."""
    begin = min(run.sent_s for run in runs)
    requests = [trace_request(run, run.sent_s - begin, recordings.get(run.generation.seed, {})) for run in runs]
    lines: Mapping[str, Any] = next(
        (each["lines"] for each in reversed([*recordings.values()]) if each.get("lines")), {}
    )
    stats = [run.generation.stats for run in runs]
    setting = measured_setting(stats, lines, concurrency=of_run["concurrency"])
    return Trace(setting.of_run(**of_run), number_anew(requests))


def trace_request(run: RecordedGeneration, arrival_s: float, recording: Mapping[str, Any]) -> TracedRequest:
    """Trace one request. Without a shadow, a token's rank is what its round says: 1 if accepted, else unknown."""
    generation = run.generation
    tokens = len(generation.token_ids)
    ranks, chances = [0] * tokens, [0.0] * tokens
    place = 0
    for record in generation.stats.records:
        if record.drafter and record.drafter not in COPYING:
            ranks[place : place + record.accepted] = [1] * min(record.accepted, tokens - place)
            chances[place : place + record.proposed] = [0.5] * min(record.proposed, tokens - place)
        place += record.accepted + 1
    for position, rank, chance in zip(
        *(recording.get(name, ()) for name in ("positions", "ranks", "chances")), strict=True
    ):
        if 0 <= position < tokens:
            ranks[position], chances[position] = rank, chance
    return TracedRequest(
        prompt=generation.prompt_token_ids,
        answer=generation.token_ids,
        ranks=tuple(ranks),
        chances=tuple(chances),
        arrival_ms=1e3 * arrival_s,
        rounds=_rounds(run, arrival_s),
    )


def _rounds(run: RecordedGeneration, arrival_s: float) -> tuple[TracedRound, ...]:
    """Return the measured rounds; the time that lies between rounds is spread evenly over them."""
    stats = run.generation.stats
    records = stats.records
    decode_tokens = stats.committed - (records[0].accepted + 1)
    total_ms = 1e3 * decode_tokens / stats.tokens_per_second if stats.tokens_per_second else 0.0
    between_ms = max(0.0, total_ms - sum(record.round_ms for record in records[1:])) / max(1, len(records) - 1)
    first_ms = 1e3 * arrival_s + stats.time_to_first_token_ms
    ends = accumulate((record.round_ms + between_ms for record in records[1:]), initial=first_ms)
    return tuple(
        TracedRound(
            at_ms=at_ms,
            committed=record.accepted + 1,
            proposed=record.proposed,
            accepted=record.accepted,
            round_ms=record.round_ms,
            draft_wait_ms=record.draft_wait_ms,
            drafter=record.drafter,
            hit=record.cache_hit,
            self_started=record.self_started,
        )
        for at_ms, record in zip(ends, records, strict=True)
    )
