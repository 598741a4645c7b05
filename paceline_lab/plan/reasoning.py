"""Reasoning and answers apart in a plan: drafts often follow one better than the other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from paceline_lab.plan.document import ReportPart
from paceline_lab.predict.cycle import StepTimes
from paceline_lab.predict.positions import DrafterPositions, TextPositions, as_arrays
from paceline_lab.predict.rounds import ProposalShape, expected_rounds
from paceline_lab.predict.verdict import Candidates
from paceline_training.corpus import Role

SHAPE = ProposalShape(4)
"""Shape of the rounds that are replayed on both."""
PARTS: Mapping[str, Role] = {"reasoning": Role.THINKING, "answer": Role.ANSWER}
EXPLANATION = (
    "Positions between the tokens with which the model marks reasoning, apart from the others: chance that the first "
    f"choice is the target's, and tokens a round of {SHAPE.name}, its own included; the fastest setting "
    "on this part alone, and its gain over target-only, one request at once. Replayed on the texts, predicted."
)


def reasoning_parts(
    texts: Sequence[TextPositions], shapes: tuple[ProposalShape, ...], times: StepTimes
) -> Iterator[ReportPart]:
    """Yield one part if some of the texts have reasoning, else none."""
    if any((text.target.roles == Role.THINKING).any() for text in texts):
        yield ReportPart("Reasoning and answers", [EXPLANATION], [list(_rows(texts, shapes, times))])


def _rows(
    texts: Sequence[TextPositions], shapes: tuple[ProposalShape, ...], times: StepTimes
) -> Iterator[dict[str, object]]:
    for temperature in sorted({text.temperature for text in texts}):
        read = [text for text in texts if text.temperature == temperature]
        for drafter in read[0].drafters:
            for part, role in PARTS.items():
                selection = [positions_at(text.drafters[drafter], text.target.roles == role) for text in read]
                positions = sum(each.ranks.size for each in selection)
                if positions:
                    rounds = expected_rounds(selection, SHAPE)
                    best, gain = Candidates({drafter: selection}, shapes).best(times, sessions=1)
                    yield {
                        "temperature": f"{temperature:g}",
                        "drafter": drafter,
                        "part": part,
                        "positions": positions,
                        "first": float(np.concatenate([each.accepted for each in selection]).mean()),
                        "tokens a round": rounds.tokens,
                        "±": "" if math.isnan(rounds.error) else rounds.error,
                        "fastest": best.setting,
                        "gain": gain,
                    }


def positions_at(drafter: DrafterPositions, mask: NDArray[np.bool_]) -> DrafterPositions:
    """Return the positions of the mask; spans are joined where others stood between them."""
    return DrafterPositions(**{name: values[mask] for name, values in as_arrays(drafter).items()})  # type: ignore[arg-type]
