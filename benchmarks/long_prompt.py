"""A long prompt arrives while sessions stream: `python -m benchmarks.long_prompt --out docs/reports`.

Real services (`paceline serve --drafter none`) asked over gRPC. Sessions stream; once each has written
some tokens, a prompt of 4,000 comes, whose prefix is computed in chunks of 128 beside their rounds. A gap
is the time between two tokens of a session as its client sees it. It is held against the step that made
its second token, as the target timed it (forward and draws): one chunk behind the prefix so far, and one
row of each session. Attention over a prefix grows with it, so steps are told by prefix length. A session
that misses a step waits for two. The prompt is random ids, others in each repetition: none is reused.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.prompts import load_prompts
from benchmarks.reporting.environment import load_average
from benchmarks.reporting.figures import percentile
from benchmarks.reporting.reports import write_report
from benchmarks.reporting.tables import markdown_table
from paceline.client import AsyncClient
from paceline.local.services import Services
from paceline.local.settings import ServeSettings
from paceline.models.tokenizer import load_tokenizer
from paceline.protocol.generation import Finished, GenerateRequest, Tokens
from paceline.protocol.proposal import NONE
from paceline.protocol.sampling import SamplingParams
from paceline.runtime.config import DEFAULT_MODEL, EngineSettings
from paceline.runtime.process import sigterm_interrupts

CHUNK = EngineSettings().prefill_chunk
BAR = 1.2
TOKENS_BEFORE = 32
TOKENS_AFTER = 16
PREFIX_STEP = 1000
ORDINARY_IDS = range(1000, 40_000)
GREEDY = SamplingParams(temperature=0)


@dataclass(frozen=True)
class Gap:
    """Between two tokens of a session, ms.

    Attributes:
        step_ms: the step that made the second: forward and draws, the target's clock.
        chunk_rows: prefix rows in that step.
        prefix: rows of the prompt that earlier steps of this session's rounds had computed.
    """

    repetition: int
    session: int
    gap_ms: float
    step_ms: float
    chunk_rows: int
    prefix: int

    @property
    def over_step(self) -> float:
        """The gap in steps."""
        return self.gap_ms / self.step_ms


@dataclass(frozen=True)
class LongPrompt:
    """What the prompt itself took, with what ran beside it."""

    repetition: int
    sessions: int
    first_token_ms: float


async def stream(client: AsyncClient, ids: tuple[int, ...], tokens: int, wrote: asyncio.Semaphore) -> TokenStream:
    """One session; `wrote` is released with each token."""
    arrivals: list[float] = []
    request = GenerateRequest(token_ids=ids, sampling=GREEDY, max_new_tokens=tokens, ignore_eos=True)
    async for event in client.stream(request):
        if isinstance(event, Tokens):
            arrivals.append(time.perf_counter())
            wrote.release()
        elif isinstance(event, Finished):
            return TokenStream(arrivals, event)
    raise AssertionError("the stream ended unfinished")


@dataclass(frozen=True)
class TokenStream:
    """A session's arrivals, one a token, and its statistics."""

    arrivals: Sequence[float]
    finished: Finished

    def gaps(self, repetition: int, session: int) -> list[Gap]:
        """One for each token but the first.

        Raises:
            ValueError: tokens came together, so that rounds can't be told from their arrivals.
        """
        found, prefix = [], 0
        records = self.finished.stats.records
        arrived = zip(self.arrivals, self.arrivals[1:], records[1:], strict=False)
        if len(records) != len(self.arrivals):
            raise ValueError(f"{len(self.arrivals)} messages of {len(records)} rounds")
        for earlier, later, record in arrived:
            timings = record.target
            # A round without a proposal is one row.
            chunk = timings.rows - timings.sessions + 1 if timings.rows > timings.sessions else 0
            step_ms = timings.forward_ms + timings.sample_ms
            found.append(Gap(repetition, session, 1e3 * (later - earlier), step_ms, chunk, prefix))
            prefix += chunk
        return found


async def repeat(client: AsyncClient, given: argparse.Namespace, repetition: int) -> tuple[list[Gap], LongPrompt]:
    """Streams, the prompt among them, and streams again."""
    tokenizer = load_tokenizer(given.model)
    chats = [prompt.chats[0] for kind in ("chat", "story") for prompt in load_prompts((kind,))[kind]]
    tokens = TOKENS_BEFORE + -(-given.prompt // CHUNK) + TOKENS_AFTER
    wrote = asyncio.Semaphore(0)
    running = [
        asyncio.create_task(stream(client, tokenizer.render_chat(chats[number % len(chats)]), tokens, wrote))
        for number in range(given.sessions)
    ]
    for _ in range(given.sessions * TOKENS_BEFORE):
        await wrote.acquire()
    ids = tuple(random.Random(repetition).choices(ORDINARY_IDS, k=given.prompt))  # noqa: S311 - no secret
    long = await client.generate(token_ids=ids, sampling=GREEDY, max_new_tokens=1, ignore_eos=True)
    streams = await asyncio.gather(*running)
    gaps = [gap for number, each in enumerate(streams) for gap in each.gaps(repetition, number)]
    return gaps, LongPrompt(repetition, given.sessions, long.stats.time_to_first_token_ms)


async def measure(address: str, given: argparse.Namespace) -> tuple[list[Gap], list[LongPrompt]]:
    """All repetitions, after a short one that isn't counted."""
    gaps: list[Gap] = []
    prompts: list[LongPrompt] = []
    async with AsyncClient(address) as client:
        await client.generate(token_ids=tuple(ORDINARY_IDS[:CHUNK]), max_new_tokens=8, ignore_eos=True)
        for repetition in range(given.repetitions):
            found, prompt = await repeat(client, given, repetition)
            gaps += found
            prompts.append(prompt)
    return gaps, prompts


def report(gaps: Sequence[Gap], prompts: Sequence[LongPrompt]) -> str:
    """The verdict, and gaps beside steps by prefix length."""
    alone = [gap for gap in gaps if not gap.chunk_rows and not gap.prefix]
    beside = [gap for gap in gaps if gap.chunk_rows == CHUNK]
    worst = max(beside, key=lambda gap: gap.gap_ms)
    furthest = max(beside, key=lambda gap: gap.over_step)
    # A full chunk at the same prefix length, whatever delayed this one.
    same = [gap.step_ms for gap in beside if gap.prefix == worst.prefix]
    usual = percentile(same, 50)
    over = worst.gap_ms / usual
    first_s = percentile([prompt.first_token_ms for prompt in prompts], 50) / 1e3
    prefixes = sorted({gap.prefix // PREFIX_STEP for gap in beside})
    lines = [
        f"The gap furthest from its step: {furthest.gap_ms:.0f} ms where the step with its chunk took "
        f"{furthest.step_ms:.0f}: **{furthest.over_step:.2f}**, "
        f"{'met' if furthest.over_step <= BAR else 'missed'} (bar {BAR}).",
        f"The longest gap: {worst.gap_ms:.0f} ms, behind a prefix of {worst.prefix}; its step took "
        f"{worst.step_ms:.0f}, {worst.over_step:.2f}.",
        f"The median step with a chunk there takes {usual:.0f} ms, so it is {over:.2f} of that: "
        "steps vary by themselves.",
        f"The prompt's first token came after {first_s:.1f} s (median).",
    ]
    rows = [_row("before the prompt", alone)]
    for place in prefixes:
        found = [gap for gap in beside if gap.prefix // PREFIX_STEP == place]
        rows.append(_row(f"prefix of {place * PREFIX_STEP} to {(place + 1) * PREFIX_STEP}", found))
    return "\n".join(lines) + "\n\n" + markdown_table(rows)


def _row(what: str, gaps: Sequence[Gap]) -> dict[str, object]:
    found, steps = [gap.gap_ms for gap in gaps], [gap.step_ms for gap in gaps]
    return {
        "gaps": what,
        "count": len(found),
        "median ms": f"{percentile(found, 50):.1f}",
        "p99 ms": f"{percentile(found, 99):.1f}",
        "worst ms": f"{max(found):.1f}",
        "step median ms": f"{percentile(steps, 50):.1f}",
        "step longest ms": f"{max(steps):.1f}",
        "gap ÷ own step, median": f"{percentile([gap.over_step for gap in gaps], 50):.2f}",
        "worst": f"{max(gap.over_step for gap in gaps):.2f}",
    }


@sigterm_interrupts()
def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=4000, help="Tokens of the long prompt.")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("docs/reports"))
    given = parser.parse_args()
    before = load_average()
    settings = ServeSettings(model=given.model, drafter=NONE, port=0, draft_port=0, target_port=0)
    with tempfile.TemporaryDirectory() as folder, Services(settings, Path(folder)) as services:
        gaps, prompts = asyncio.run(measure(services.address, given))
        threads = services.processes["target"].threads
    facts = {"model": given.model, "target threads": str(threads), "sessions": str(given.sessions)}
    facts |= {"prompt": f"{given.prompt} tokens in chunks of {CHUNK}", "repetitions": str(given.repetitions)}
    facts |= {"load average before": before}
    print(write_report(given.out, "long-prompt", facts, [*gaps, *prompts], report(gaps, prompts)))


if __name__ == "__main__":
    main()
