"""Which figures predict acceptance on traffic not yet seen.

    python -m benchmarks.predictors --pair smollm2-135m:default --pair qwen2.5-coder-1.5b:default --out docs/reports

The target answers the benchmarks' prompts; every drafter reads the answers teacher-forced; rounds are replayed
(docs/exactness.md §7). Nothing is timed, so other work on the machine changes nothing but how long it takes. A run
that was stopped goes on with the same command.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import REPORTS
from benchmarks.predictors.drafters import DISTURBED
from benchmarks.predictors.folds import NEW_KINDS, NEW_PROMPTS, folds_of
from benchmarks.predictors.of_drafters import rank_drafters
from benchmarks.predictors.of_positions import rank_positions
from benchmarks.predictors.of_prompts import rank_prompts
from benchmarks.predictors.prior import PriorWorth, prior_worth, requests_of
from benchmarks.predictors.reading import StudiedText, StudyWanted, read_study
from benchmarks.predictors.report import PredictorRanking, plots_of, text_of, text_of_priors
from benchmarks.prompts import KINDS
from benchmarks.reporting.progress import progress_bar, stderr_console
from benchmarks.reporting.reports import describe, write_report
from draft_service.drafters.catalogue import build_catalogue
from paceline.engine.loading import load_engine
from paceline.models.tokenizer import load_tokenizer
from paceline.protocol.errors import require
from paceline.runtime.config import FAST_DTYPE, DraftConfig, EngineSettings

PAIRS = ("smollm2-135m:default", "qwen2.5-coder-1.5b:default")


def read_pair(
    pair: str, temperatures: Sequence[float], wanted: StudyWanted, work: Path
) -> dict[float, list[StudiedText]]:
    """Both models of `TARGET:DRAFT` on all prompts, by temperature.

    Raises:
        InvalidInput: a pair without a colon, or whose models can't be loaded.
    """
    target_model, colon, draft_model = pair.partition(":")
    require(bool(colon and draft_model), "pair", pair, "TARGET:DRAFT")
    settings = EngineSettings()
    tokenizer = load_tokenizer(target_model)
    target = load_engine(target_model, settings)
    fast = settings.model_copy(update={"dtype": FAST_DTYPE})
    drafted = DraftConfig(drafters=(f"model:{draft_model}",), target_model=target_model, engine=fast)
    (draft,) = build_catalogue(drafted).engines
    folder = work / pair.replace(":", "-").replace("/", "_")
    total = 2 * len(temperatures) * wanted.prompts * len(wanted.kinds)
    with progress_bar(stderr_console(), pair, total) as advance:
        return {
            temperature: read_study(
                target, draft, tokenizer, wanted, temperature, folder / f"{temperature:g}", advance
            )
            for temperature in temperatures
        }


def rankings_of(pair: str, read: dict[float, list[StudiedText]]) -> list[PredictorRanking]:
    """All three questions, by temperature and by what is new."""
    found: list[PredictorRanking] = []
    for temperature, texts in read.items():
        for scheme in (NEW_PROMPTS, NEW_KINDS):
            ranked = rank_drafters(texts, folds_of(texts, scheme))
            found.append(PredictorRanking(pair, temperature, scheme, "drafters", ranked))
        ranked = rank_positions(texts, folds_of(texts, NEW_KINDS))
        found.append(PredictorRanking(pair, temperature, NEW_KINDS, "positions", ranked))
        for drafter, ranked in rank_prompts(texts, folds_of(texts, NEW_PROMPTS)).items():
            found.append(PredictorRanking(pair, temperature, NEW_PROMPTS, f"prompts, {drafter}", ranked))
    return found


def main() -> None:
    """Read, rank, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predictors", description=__doc__)
    parser.add_argument("--pair", action="append", help=f"TARGET:DRAFT; repeatable; {' and '.join(PAIRS)}")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of prompts, with commas between")
    parser.add_argument("--prompts", type=int, default=8, help="of each kind, at most 8")
    parser.add_argument("--answer-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, action="append", help="repeatable; 0 and 1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path(".predictors"), help="what was read, to go on with")
    parser.add_argument("--out", type=Path, default=REPORTS)
    args = parser.parse_args()
    wanted = StudyWanted(tuple(args.kinds.split(",")), args.prompts, args.answer_tokens, args.seed)
    temperatures = args.temperature or [0.0, 1.0]
    rankings: list[PredictorRanking] = []
    priors: list[PriorWorth] = []
    counts: dict[str, str] = {}
    for pair in args.pair or PAIRS:
        read = read_pair(pair, temperatures, wanted, args.work)
        rankings += rankings_of(pair, read)
        for temperature, texts in read.items():
            priors += prior_worth(pair, temperature, requests_of(texts))
            positions = sum(text.answer.target.places.size for text in texts)
            counts[f"{pair} at {temperature:g}"] = f"{len(texts)} prompts, {positions} positions"
    facts = describe() | {"drafters": f"{len(DISTURBED)}: {', '.join(DISTURBED)}", "seed": str(args.seed)} | counts
    values = {"rankings": [asdict(each) for each in rankings], "priors": [asdict(each) for each in priors]}
    text = text_of(rankings) + text_of_priors(priors)
    print(write_report(args.out, "predictors", facts, values, text, plots_of(rankings)).read_text())


if __name__ == "__main__":
    main()
