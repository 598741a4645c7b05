"""How often the proposal for a round's outcome is there when the verdict is: `python -m benchmarks.hit_rate`.

A hit: at least one token that was drafted for this outcome is there the moment that the verdict is.
All rounds count but the first, which has no outcome before it. One session at a time, coupled, k = 4.

Simulated models: the named drafts relate to their target as real ones do. Beside each rate stands what the
distributions alone predict at temperature 1: the share of outcomes among the guesses, if there is
time for all of them. Mean drafted: tokens of a proposal that was a hit.

With `--model` a real model and its own draft, one thread each, on the prompts of `paceline bench`
(chat, story, code-edit, summary, in turn).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import REPORTS
from benchmarks.prompts import load_prompts
from benchmarks.reporting.presentation import markdown_table, titled, verdict
from benchmarks.reporting.reports import write_rows
from benchmarks.simulated.distributions import predicted_hit_rate
from benchmarks.simulated.services import ModelServices, SimulatedPair, drafted, is_hit, request
from paceline.client import Client
from paceline.local.service_process import Flags
from paceline.models.resolve import DEFAULT_DRAFT, resolve_draft
from paceline.models.table_names import DISTRIBUTIONS
from paceline.protocol.generation import GenerateRequest
from paceline.protocol.records import RoundRecord
from paceline.protocol.sampling import SamplingParams
from paceline.runtime.process import sigterm_interrupts

K = 4
VERIFY_MS, DRAFT_MS = 11.45, 2.54
BARS = {("middling", 4): 0.88, ("close", 4): 0.97}
FAN_OUTS = range(1, 9)
SHIPPED = "shipped draft"
REAL_KINDS = ("chat", "story", "code-edit", "summary")
REAL_TOKENS = 128


@dataclass(frozen=True)
class HitRate:
    """One draft at one fan-out. Rates are shares of `rounds`."""

    draft: str
    temperature: float
    fan_out: int
    rounds: int
    hit_rate: float
    predicted: float | None
    accepted_rate: float
    mean_drafted: float
    tokens_per_second: float


Asked = Callable[[int], GenerateRequest]
"""The request of a number; 0 is the warm-up."""


def measure(client: Client, draft: str, temperature: float, fan_out: int, rounds: int, asked: Asked) -> HitRate:
    """Generate until `rounds` rounds are counted, one generation beyond the warm-up at least."""
    records: list[RoundRecord] = []
    speeds: list[float] = []
    number = 0
    while len(records) < rounds:
        stats = client.generate(replace(asked(number), sampling=SamplingParams(temperature=temperature))).stats
        if number:
            records += stats.records[1:]
            speeds.append(stats.tokens_per_second)
        number += 1
    hits = [record for record in records if is_hit(record)]
    return HitRate(
        draft=draft,
        temperature=temperature,
        fan_out=fan_out,
        rounds=len(records),
        hit_rate=len(hits) / len(records),
        predicted=predicted_hit_rate(f"distribution={draft}", K, fan_out)[1] if draft in DISTRIBUTIONS else None,
        accepted_rate=sum(r.accepted for r in records) / max(1, sum(r.proposed for r in records)),
        mean_drafted=sum(record.proposed for record in hits) / max(1, len(hits)),
        tokens_per_second=sum(speeds) / len(speeds),
    )


def table(rates: Sequence[HitRate]) -> str:
    """One row a measurement."""
    return markdown_table([titled(rate, predicted=_predicted(rate), bar=_bar(rate)) for rate in rates])


def _predicted(rate: HitRate) -> object:
    return rate.predicted if rate.predicted is not None and rate.temperature == 1 else ""


def _bar(rate: HitRate) -> str:
    bar = BARS.get((rate.draft, rate.fan_out))
    return verdict(rate.hit_rate, bar) if bar is not None and rate.temperature == 1 else ""


def simulated_rates(draft: str, given: argparse.Namespace, folder: Path) -> Iterator[HitRate]:
    """One simulated draft at every fan-out and temperature."""

    def asked(number: int) -> GenerateRequest:
        return request(number, given.tokens, drafted(K))

    pair = SimulatedPair(f"distribution={draft}", VERIFY_MS, DRAFT_MS)
    yield from rates_of(draft, ModelServices.of(folder, pair), asked, given)


def real_rates(given: argparse.Namespace, folder: Path) -> Iterator[HitRate]:
    """A real model's own draft at every fan-out and temperature."""
    prompts = zip(*load_prompts(REAL_KINDS).values(), strict=False)
    chats = [chat for alike in prompts for prompt in alike for chat in prompt.chats]
    tokens = min(given.tokens, REAL_TOKENS)

    def asked(number: int) -> GenerateRequest:
        return replace(request(number, tokens, drafted(K)), token_ids=(), messages=chats[number % len(chats)])

    yield from rates_of(SHIPPED, services_of(given.model, folder), asked, given)


def services_of(model: str, folder: Path) -> ModelServices:
    """A pulled model and the draft that is shipped for it."""
    return ModelServices(folder, model, resolve_draft(DEFAULT_DRAFT, model))


def rates_of(draft: str, pair: ModelServices, asked: Asked, given: argparse.Namespace) -> Iterator[HitRate]:
    """One pair at every fan-out and temperature."""
    with pair as services:
        for fan_out in given.fan_outs:
            rounds = given.bar_rounds if (draft, fan_out) in BARS else given.rounds
            flags: Flags = {"fan_out": fan_out}
            with services.coordinator(f"fan-out-{fan_out}", flags) as address, Client(address) as client:
                for temperature in given.temperatures:
                    yield measure(client, draft, temperature, fan_out, rounds, asked)


@sigterm_interrupts()
def main() -> None:
    """Measure each draft at each fan-out and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000, help="Rounds of a row.")
    parser.add_argument("--bar-rounds", type=int, default=4000, help="Rounds of a row that has a bar.")
    parser.add_argument("--tokens", type=int, default=512, help="Tokens of a generation; at most 128 with --model.")
    parser.add_argument("--drafts", nargs="+", default=["middling", "close"])
    parser.add_argument("--model", help="A pulled model with a draft of its own, in place of simulated ones.")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[1.0])
    parser.add_argument("--fan-outs", nargs="+", type=int, default=list(FAN_OUTS))
    parser.add_argument("--out", type=Path, default=REPORTS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.model:
            settings = {"k": str(K), "model": given.model, "threads": "1 each"}
            rates = [*real_rates(given, Path(folder))]
        else:
            settings = {"k": str(K), "T_verify ms": str(VERIFY_MS), "T_draft ms": str(DRAFT_MS)}
            rates = [rate for draft in given.drafts for rate in simulated_rates(draft, given, Path(folder) / draft)]
    name = "hit-rate-real" if given.model else "hit-rate"
    print(write_rows(given.out, name, settings, rates, table(rates)))


if __name__ == "__main__":
    main()
