"""Figures of two passes over a text, position by position, as arrays that are stored in files.

A position is a token of the target's answer, in the text's order. Its token is the target's own draw there: in texts
that the target wrote it is the text's token; in others it is the token that the target would have drawn in its place.

Probabilities, entropies, KL and overlap are of the processed distributions at the temperature; at temperature 0,
where those are single points, of the distributions at temperature 1, as a draft's confidence is. Unknown figures are
`ABSENT`: services send no whole distributions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from paceline_lab.predict.figures import RANKS, calibration_error

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class TargetPositions:
    """The target's figures at a text's n positions. Field names are the names of arrays in files.

    Attributes:
        places: index of the token in the text.
        roles: `paceline_training.corpus.Role` of the token.
        written: the text's own token.
        tokens: the target's draw.
        tops: the target's most probable token.
        chances: p of the draw.
        top_chances: p of the most probable token.
        written_logprobs: natural logarithm of p of the text's own token, at temperature 1.
        entropies: nats.
    """

    places: Ints
    roles: NDArray[np.int8]
    written: Ints
    tokens: Ints
    tops: Ints
    chances: Floats
    top_chances: Floats
    written_logprobs: Floats
    entropies: Floats


@dataclass(frozen=True, eq=False)
class DrafterPositions:
    """A drafter's figures at the same n positions. Field names are the names of arrays in files.

    Attributes:
        reach: [n, depths, RANKS] chance that the drafter's first 1, 2 … choices hold the target's draw under shared
            noise, with the token at each depth of a round; one depth: the same at every depth.
        offered: [n] most tokens of a round that begins with this one; a model's has no such limit (`ENDLESS`).
        ranks: [n] place of the target's draw in the drafter's order under the noise of this text; 0: not in the first
            `RANKS`.
        choices: [n] the drafter's first choice under that noise; -1: none.
        tops: [n] the drafter's most probable token; -1: none.
        confidence: [n] the drafter's q of its first choice; a match's score.
        chances: [n] q of the target's draw.
        overlaps: [n] Σ min(p, q) = 1 - TV.
        divergences: [n] KL(p ‖ q) in nats, `LEAST_Q` being the least q.
        entropies: [n] nats.
    """

    reach: Floats
    offered: Ints
    ranks: Ints
    choices: Ints
    tops: Ints
    confidence: Floats
    chances: Floats
    overlaps: Floats
    divergences: Floats
    entropies: Floats

    def __post_init__(self) -> None:
        assert self.reach.ndim == 3 and self.reach.shape[2] == RANKS, "made by the passes"

    @property
    def accepted(self) -> Floats:
        """Return the chance that the first drafted token of a round is accepted, in a chain, [n]."""
        return self.reach[:, 0, 0]


def calibration_of(texts: Sequence[DrafterPositions]) -> float:
    """Return the expected calibration error of a drafter's confidence in first choices.

    It is over all texts' positions together: the bins of a single text are noise.
    """
    masks = [each.offered > 0 for each in texts]
    confidence = [each.confidence[mask] for each, mask in zip(texts, masks, strict=True)]
    accepted = [each.accepted[mask] for each, mask in zip(texts, masks, strict=True)]
    return calibration_error(np.concatenate(confidence), np.concatenate(accepted))


ABSENT = float("nan")
"""A figure that is not known, and is not guessed."""
ENDLESS = 1 << 16
"""`offered` of a drafter that always has a next token."""


@dataclass(frozen=True, eq=False)
class TextPositions:
    """One text at one temperature: the target's positions, and each drafter's by name.

    Attributes:
        own: whether the target wrote the text, with the noise of the ranks.
        tokens: the whole text.
    """

    temperature: float
    own: bool
    tokens: Ints
    target: TargetPositions
    drafters: Mapping[str, DrafterPositions]


def as_arrays(value: TargetPositions | DrafterPositions) -> dict[str, NDArray[np.generic]]:
    """Return the arrays by name, as files have them."""
    return {each.name: getattr(value, each.name) for each in fields(value)}
