"""n-gram drafting where the answer copies the prompt, beside target-only, through the same services.

    python -m benchmarks.copy_task --pairs 9 --out docs/reports

Pairs are interleaved: drafted, target-only, drafted, … so that whatever else the machine
does hits both. Greedy decoding; the two texts of a pair are checked to be equal.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.environment import as_markdown, describe
from paceline.client import Client, Generation
from paceline.supervisor import ServeSettings, Services
from paceline.types import ChatMessage, GenerateRequest, SamplingParams, SpeculationSettings

PASSAGE = (
    "The lighthouse stood at the end of a long stone pier. Every evening the keeper climbed its two hundred "
    "steps, trimmed the lamp, and wrote the weather into a heavy book. Ships passed far out, and their crews "
    "knew by the colour of the light how close the rocks lay. In winter the waves broke over the pier and no "
    "boat could land for weeks. Then the keeper ate bread and dried fish, mended his coat by the fire, and read "
    "the old pages of the book, where storms of other years were written down in other hands."
)
CODE = (
    "def total_price(items, tax):\n    result = 0\n    for item in items:\n"
    "        result = result + item.price * item.count\n    result = result + result * tax\n    return result\n\n\n"
    "def average_price(items, tax):\n    result = total_price(items, tax)\n    if len(items) == 0:\n"
    "        return 0\n    result = result / len(items)\n    return result\n"
)
PROMPTS = {
    "repeat": f"Repeat the following text exactly, word for word:\n\n{PASSAGE}",
    "rename": f"```python\n{CODE}```\n\nWrite this code again with `result` renamed to `total`.",
}


@dataclass(frozen=True)
class Pair:
    """One interleaved pair."""

    drafted: Generation
    plain: Generation

    @property
    def speedup(self) -> float:
        """Drafted tokens a second over target-only's."""
        return self.drafted.stats.tokens_per_second / self.plain.stats.tokens_per_second


def run_pairs(client: Client, prompt: str, pairs: int, tokens: int, k: int) -> list[Pair]:
    """Run `pairs` interleaved pairs after one of each that isn't counted."""

    def generate(off: bool) -> Generation:
        return client.generate(
            GenerateRequest(
                messages=(ChatMessage("user", prompt),),
                sampling=SamplingParams(temperature=0),
                max_new_tokens=tokens,
                speculation=SpeculationSettings(off=off, drafter="ngram", num_draft_tokens=k),
            )
        )

    measured = [Pair(generate(False), generate(True)) for _ in range(pairs + 1)][1:]
    for pair in measured:
        if pair.drafted.token_ids != pair.plain.token_ids:
            raise AssertionError("drafted and target-only text differ")
    return measured


def summary(pairs: list[Pair]) -> dict[str, float]:
    """Medians and spread of one prompt."""
    speedups = sorted(pair.speedup for pair in pairs)
    drafted = [pair.drafted.stats.tokens_per_second for pair in pairs]
    plain = [pair.plain.stats.tokens_per_second for pair in pairs]
    stats = pairs[0].drafted.stats
    return {
        "drafted_tokens_per_second": statistics.median(drafted),
        "target_only_tokens_per_second": statistics.median(plain),
        "speedup_median": statistics.median(speedups),
        "speedup_min": speedups[0],
        "speedup_max": speedups[-1],
        "mean_acceptance_length": stats.mean_acceptance_length,
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "tokens": float(len(pairs[0].drafted.token_ids)),
    }


def report(results: dict[str, dict[str, float]], facts: dict[str, str]) -> str:
    """The Markdown report."""
    lines = ["# n-gram drafting on copy tasks", "", as_markdown(facts)]
    titles = (
        "prompt",
        "tokens",
        "n-gram tok/s",
        "target-only tok/s",
        "speed-up (min to max)",
        "mean acceptance length",
    )
    lines += [" | ".join(("", *titles, "")).strip(), "|---" * len(titles) + "|"]
    for name, row in results.items():
        cells = (
            name,
            f"{row['tokens']:.0f}",
            f"{row['drafted_tokens_per_second']:.1f}",
            f"{row['target_only_tokens_per_second']:.1f}",
            f"{row['speedup_median']:.2f} ({row['speedup_min']:.2f} to {row['speedup_max']:.2f})",
            f"{row['mean_acceptance_length']:.2f}",
        )
        lines.append(" | ".join(("", *cells, "")).strip())
    lines += ["", "Prompts:", ""] + [f"- {name}: {prompt!r}" for name, prompt in PROMPTS.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the benchmark and write its two report files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=192, help="Most tokens of an answer.")
    parser.add_argument("--num-draft-tokens", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("docs/reports"))
    arguments = parser.parse_args()
    settings = ServeSettings(model=arguments.model, drafter="ngram", port=0, draft_port=0, target_port=0)
    results = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        Services(settings, Path(folder)) as services,
        Client(services.address) as client,
    ):
        for name, prompt in PROMPTS.items():
            pairs = run_pairs(client, prompt, arguments.pairs, arguments.tokens, arguments.num_draft_tokens)
            results[name] = summary(pairs)
    facts = describe() | {"pairs": str(arguments.pairs), "k": str(arguments.num_draft_tokens)}
    arguments.out.mkdir(parents=True, exist_ok=True)
    stem = arguments.out / f"copy-task-{datetime.date.today().isoformat()}"
    stem.with_suffix(".json").write_text(json.dumps({"facts": facts, "results": results}, indent=2) + "\n")
    text = report(results, facts)
    stem.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
