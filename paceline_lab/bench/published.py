"""The simulator beside published figures of speculative decoding on two sets of GPUs: SSD (arXiv 2603.03251).

`python -m paceline_lab.bench.published`. Target Qwen3-32B on four H100, draft Qwen3-0.6B on a fifth, one request,
greedy. What is fitted, and what is not:

- a target's step, from the autoregressive speed; a step of k + 1 rows is taken to be as long;
- a draft's step and the acceptance, which are not published with the speeds, from two of them: one after the other
  with k = 4, and overlapped with k = 4;
- overlapped with k = 5, 6 and 7 are predictions.

Overlapped, their target waits until the draft has all k tokens of every outcome (`ConstantPolicy.whole`), here with
three outcomes for each node. The text is as easy everywhere, which real ones are not.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from scipy.optimize import brentq

from paceline.costs.cost_line import CostLine
from paceline_lab.bench.simulated.analytic import expected_tokens
from paceline_lab.reporting.presentation import markdown_table
from paceline_lab.reporting.reports import describe, write_report
from paceline_lab.simulate.policies import ConstantPolicy, Policy
from paceline_lab.simulate.run import simulate
from paceline_lab.simulate.synthetic import SyntheticPair, synthetic_requests
from paceline_lab.simulate.trace import TracedSetting

FAN_OUT = 3
"""SSD's default `--f`."""
TOKENS = 512
"""Of a request, as SSD's `--output_len`."""
REQUESTS = 16
PAPER = "arXiv 2603.03251, Qwen3-32B and 0.6B, as quoted by others; the setting of each is not stated there"
REPOSITORY = "github.com/tanishqkumar/ssd at 2d8487c, reference test outputs: 4 or 5 H100, k = 4, f = 2"


@dataclass(frozen=True)
class PublishedRun:
    """Speeds of one pair, tokens per second, each with the k that it had.

    Attributes:
        overlapped: by k; the first one is fitted to, where no draft time is stated.
        drafting_ms: of a whole proposal of the first k, where that is stated.
    """

    source: str
    autoregressive: float
    sequential: float
    k: int
    overlapped: tuple[tuple[int, float], ...]
    drafting_ms: float = 0.0
    fan_out: int = FAN_OUT


RUNS = (
    PublishedRun(PAPER, 97.4, 141.4, 4, ((4, 210.9), (5, 193.6), (6, 175.3), (7, 158.6))),
    PublishedRun(REPOSITORY, 89.0, 156.0, 4, ((4, 195.0),), drafting_ms=17.93, fan_out=2),
)


@dataclass(frozen=True)
class SimulatedSpeed:
    """A published speed beside the simulated one."""

    source: str
    what: str
    published: float
    simulated: float
    fitted: bool

    @property
    def off(self) -> float:
        """By how much the simulated speed is off."""
        return self.simulated / self.published - 1

    def row(self) -> dict[str, object]:
        """A table's line."""
        return {
            "what": self.what,
            "published tokens/s": self.published,
            "simulated tokens/s": round(self.simulated, 1),
            "off by": f"{self.off:+.1%}",
            "fitted": "yes" if self.fitted else "no",
            "source": self.source,
        }


@dataclass(frozen=True)
class FittedPair:
    """A target's step, a draft's, and how often the draft is right."""

    target_ms: float
    draft_ms: float
    acceptance: float

    def speed(self, policy: Policy, fan_out: int) -> float:
        """Tokens per second of a request behind its first round."""
        setting = TracedSetting(
            alone=CostLine(((1.0, self.target_ms),)),
            draft=CostLine(((1.0, self.draft_ms),)),
            fan_out=fan_out,
            max_prefetched=0,
            concurrency=1,
        )
        requests = synthetic_requests(SyntheticPair.even(self.acceptance), REQUESTS, TOKENS)
        return simulate(setting, requests, policy).decode_tokens_per_second


def fit(run: PublishedRun) -> FittedPair:
    """The pair that has the two speeds without overlap, and the stated drafting time or the first speed with it."""
    target_ms = 1e3 / run.autoregressive
    if run.drafting_ms:
        draft_ms = run.drafting_ms / (run.k + 1)
        tokens = run.sequential / 1e3 * (target_ms + run.k * draft_ms)
        acceptance = float(brentq(lambda a: expected_tokens(a, run.k) - tokens, 0.01, 0.999))
        return FittedPair(target_ms, draft_ms, acceptance)

    def pair(acceptance: float) -> FittedPair:
        sequential_ms = 1e3 * expected_tokens(acceptance, run.k) / run.sequential
        return FittedPair(target_ms, (sequential_ms - target_ms) / run.k, acceptance)

    k, overlapped = run.overlapped[0]
    policy = ConstantPolicy(k, run.fan_out, whole=True)
    return pair(float(brentq(lambda a: pair(a).speed(policy, run.fan_out) - overlapped, 0.6, 0.95, xtol=1e-3)))


def beside_published(run: PublishedRun, pair: FittedPair) -> list[SimulatedSpeed]:
    """Every speed of a run, simulated."""

    def beside(what: str, published: float, policy: Policy, *, fitted: bool) -> SimulatedSpeed:
        return SimulatedSpeed(run.source, what, published, pair.speed(policy, run.fan_out), fitted)

    found = [
        beside("autoregressive", run.autoregressive, ConstantPolicy(0), fitted=True),
        beside(f"one after the other, k = {run.k}", run.sequential, ConstantPolicy(run.k), fitted=True),
    ]
    for number, (k, speed) in enumerate(run.overlapped):
        policy = ConstantPolicy(k, run.fan_out, whole=True)
        fitted = not number and not run.drafting_ms
        found.append(beside(f"overlapped, k = {k}", speed, policy, fitted=fitted))
    return found


def published_text(pairs: Sequence[FittedPair], found: Sequence[SimulatedSpeed]) -> str:
    """The report."""
    fitted = [
        {
            "source": run.source,
            "target step ms": pair.target_ms,
            "draft step ms": pair.draft_ms,
            "acceptance": pair.acceptance,
        }
        for run, pair in zip(RUNS, pairs, strict=True)
    ]
    return (
        f"# The simulator beside published figures\n\n{__doc__ or ''}\n## Fitted\n\n{markdown_table(fitted)}\n"
        f"## All\n\n{markdown_table([each.row() for each in found])}"
    )


def main() -> None:
    """Print the comparison, or write its report."""
    parser = argparse.ArgumentParser(description="The simulator beside published figures.")
    parser.add_argument("--out", type=Path, default=None, help="folder of the report")
    given = parser.parse_args()
    pairs = [fit(run) for run in RUNS]
    found = [each for run, pair in zip(RUNS, pairs, strict=True) for each in beside_published(run, pair)]
    text = published_text(pairs, found)
    if given.out is not None:
        values = {"pairs": [asdict(each) for each in pairs], "speeds": [asdict(each) for each in found]}
        write_report(given.out, "simulator-published", describe(), values, text)
    print(text)


if __name__ == "__main__":
    main()
