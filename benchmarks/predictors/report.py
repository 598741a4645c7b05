"""The study's tables and plots."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.predictors.correlation import RankAgreement
from benchmarks.predictors.of_drafters import K
from benchmarks.predictors.of_positions import AFTER
from benchmarks.predictors.of_prompts import EARLY
from benchmarks.predictors.prior import PriorWorth
from benchmarks.reporting.figures import Spread
from benchmarks.reporting.presentation import Bars, Plot, markdown_table

QUESTIONS = {
    "drafters": "Spearman's ρ between what a predictor says of each drafter by known texts, and its tokens a round "
    f"(k = {K}) on new ones, both replayed; the mean of both ways round. The drafters are one draft with its logits "
    "scaled and disturbed (`benchmarks/predictors/drafters.py`), so that confidence and quality part.",
    "positions": "Spearman's ρ between a predictor at a position, and whether the token that the draft chose there "
    f"was the target's. {', '.join(AFTER)} need the target's own distribution and come too late to choose by.",
    "prompts, draft": "Spearman's ρ between what is known of a prompt, and the draft's tokens a round "
    f"(k = {K}) behind the answer's first {EARLY} tokens. `first tokens …` are known after those; the rest before "
    "the first round.",
    "prompts, ngram": "The same for rounds of matches in the text so far.",
}


@dataclass(frozen=True)
class PredictorRanking:
    """How well each predictor ranks, in one setting."""

    pair: str
    temperature: float
    new: str
    question: str
    agreement: Mapping[str, RankAgreement]

    @property
    def setting(self) -> str:
        """In words."""
        return f"{self.pair}, T = {self.temperature:g}, {self.new}"


def text_of(rankings: Sequence[PredictorRanking]) -> str:
    """The report's Markdown: a table for each question, predictors by the mean of their ρ, best first."""
    parts = [
        "# What predicts acceptance on traffic not yet seen\n\n"
        "Each cell: Spearman's ρ (95 % interval by bootstrap over prompts). Predictors are oriented so that more "
        "should mean more accepted tokens; a negative ρ says that it does not. `nan`: nothing differed."
    ]
    for question, about in QUESTIONS.items():
        of = [ranking for ranking in rankings if ranking.question == question]
        if of:
            parts.append(f"## {question.capitalize()}\n\n{about}\n\n{markdown_table(_rows(of))}")
    return "\n\n".join(parts) + "\n"


def text_of_priors(priors: Sequence[PriorWorth]) -> str:
    """What a prior of the draft's acceptance is worth to the planner."""
    rows = [
        {
            "pair": each.pair,
            "T": f"{each.temperature:g}",
            "services": each.services,
            "nothing known": f"{each.nothing_known:.1f}",
            "earlier requests": f"{each.earlier_requests:.1f}",
            "foretold": f"{each.foretold:.1f}",
            "foretold adds": f"{each.most:+.1%}",
        }
        for each in priors
    ]
    return (
        "\n## What the prior of a fresh request is worth\n\n"
        "Simulated tokens per second of the study's requests, one after the other, with the planner's own code. A "
        "fresh request begins with what the planner believes before it has seen anything, with what it has seen of "
        "earlier requests (as it is), or with its own acceptance foretold, more than which no predictor can tell.\n\n"
        f"{markdown_table(rows)}"
    )


def _rows(rankings: Sequence[PredictorRanking]) -> list[dict[str, object]]:
    order = sorted(_names(rankings), key=lambda name: -mean_rho(rankings, name))
    return [
        {
            "predictor": name,
            "mean": f"{mean_rho(rankings, name):.2f}",
            **{ranking.setting: _cell(ranking.agreement.get(name)) for ranking in rankings},
        }
        for name in order
    ]


def _names(rankings: Sequence[PredictorRanking]) -> list[str]:
    return list(dict.fromkeys(name for ranking in rankings for name in ranking.agreement))


def mean_rho(rankings: Sequence[PredictorRanking], name: str) -> float:
    """Over the settings in which the predictor says anything; -1 where it says nothing in any."""
    found = [each.agreement[name].rho for each in rankings if name in each.agreement]
    said = [rho for rho in found if not math.isnan(rho)]
    return sum(said) / len(said) if said else -1.0


def _cell(agreement: RankAgreement | None) -> str:
    if agreement is None:
        return ""
    return f"{agreement.rho:.2f} ({agreement.low:.2f} to {agreement.high:.2f})"


def plots_of(rankings: Sequence[PredictorRanking]) -> list[Plot]:
    """One plot a question: a group for each predictor, a colour for each setting."""
    plots: list[Plot] = []
    for question in QUESTIONS:
        of = [ranking for ranking in rankings if ranking.question == question]
        names = sorted(_names(of), key=lambda name: -mean_rho(of, name)) if of else []
        bars = [Bars(each.setting, [_spread(each.agreement.get(name)) for name in names]) for each in of]
        if bars:
            groups = [name.replace(" ", "\n") for name in names]
            plots.append(Plot(f"{question.capitalize()}: rank correlation", "Spearman's ρ", groups, bars))
    return plots


def _spread(agreement: RankAgreement | None) -> Spread | None:
    if agreement is None or math.isnan(agreement.low):
        return None
    low, high = min(agreement.low, agreement.rho), max(agreement.high, agreement.rho)
    return Spread(agreement.rho, low, high, 1)
