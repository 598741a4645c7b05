"""Cells of the grid: predictions, measurements of served requests, and by how much they differ. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median

from paceline.protocol.records import GenerationStats
from paceline_lab.predict.rounds import plus_minus

TOKENS_BAR = 0.05
SPEED_BAR = 0.07
"""Bounds on the median error of a grid: an error in a cell has the served run's own noise in it."""


@dataclass(frozen=True)
class ServedRounds:
    """Rounds of the requests of one cell.

    Attributes:
        rounds, tokens: rounds behind the first of each request, and the tokens that they committed. The answer's end
            cuts the last round, as it cuts a prediction's.
        squares: sum of the squares of each round's tokens.
        decode_tokens, decode_s: tokens behind the first round of each request, and the time that they took.
    """

    rounds: int
    tokens: int
    squares: int
    decode_tokens: int
    decode_s: float

    @classmethod
    def of(cls, stats: Sequence[GenerationStats]) -> ServedRounds:
        """Fold requests of one setting."""
        committed = [tokens for each in stats for tokens in _committed(each)]
        with_speed = [each for each in stats if each.tokens_per_second > 0]
        counts = [each.committed - each.records[0].accepted - 1 for each in with_speed]
        seconds = sum(count / each.tokens_per_second for count, each in zip(counts, with_speed, strict=True))
        return cls(len(committed), sum(committed), sum(each * each for each in committed), sum(counts), seconds)

    @property
    def tokens_a_round(self) -> float:
        """Return the mean tokens of a round; 0 without rounds."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def noise(self) -> float:
        """Return the standard error of that mean, as if rounds were independent."""
        if self.rounds < 2:
            return 0.0
        variance = self.squares / self.rounds - self.tokens_a_round**2
        return math.sqrt(max(0.0, variance) / self.rounds)

    @property
    def ms_per_token(self) -> float:
        """Return the milliseconds per token of one request."""
        return 1e3 * self.decode_s / self.decode_tokens if self.decode_tokens else 0.0


def _committed(stats: GenerationStats) -> list[int]:
    """Return the tokens of each round behind the first."""
    ends = [0, *accumulate(record.accepted + 1 for record in stats.records)]
    return [min(end, stats.committed) - begin for begin, end in pairwise(ends)][1:]


@dataclass(frozen=True)
class GridCell:
    """One setting on one kind of prompt.

    Attributes:
        predicted_tokens, predicted_error: tokens of a round, and their standard error over texts.
        predicted_ms: time of a token, by cost lines that were measured before services were started.
        stated_ms: the same by the cost lines that the services stated while they ran.
        own_ms: the same by the medians of this cell's own rounds: an error then is the formula's.
        plain_ms: time of a token target-only, by the lines from before.
        rounds, plain: rounds of this setting, and of target-only at the same load.
    """

    kind: str
    temperature: float
    drafter: str
    setting: str
    load: int
    predicted_tokens: float
    predicted_error: float
    predicted_ms: float
    stated_ms: float
    own_ms: float
    plain_ms: float
    rounds: ServedRounds
    plain: ServedRounds

    @property
    def tokens_off(self) -> float:
        """Return predicted tokens a round over served, less 1."""
        return self.predicted_tokens / self.rounds.tokens_a_round - 1

    @property
    def speed_off(self) -> float:
        """Return predicted tokens per second over served, less 1, by the lines of the services."""
        return self.rounds.ms_per_token / self.stated_ms - 1

    @property
    def unseen_speed_off(self) -> float:
        """Return the same by the lines measured before."""
        return self.rounds.ms_per_token / self.predicted_ms - 1

    @property
    def formula_off(self) -> float:
        """Return the same by the cell's own rounds."""
        return self.rounds.ms_per_token / self.own_ms - 1

    @property
    def gain_off(self) -> float:
        """Return the predicted speed-up over target-only, over the served one, less 1, by the lines from before."""
        predicted_gain = self.plain_ms / self.predicted_ms
        return predicted_gain / (self.plain.ms_per_token / self.rounds.ms_per_token) - 1

    def row(self) -> dict[str, object]:
        """Return a row of the table."""
        return {
            "prompts": self.kind,
            "T": f"{self.temperature:g}",
            "drafter": self.drafter,
            "setting": self.setting,
            "requests": self.load,
            "rounds": self.rounds.rounds,
            "served tokens a round": f"{self.rounds.tokens_a_round:.3f} ± {self.rounds.noise:.3f}",
            "predicted": f"{self.predicted_tokens:.3f}{plus_minus(self.predicted_error, 3)}",
            "off by": f"{self.tokens_off:+.1%}",
            "served ms a token": f"{self.rounds.ms_per_token:.2f}",
            "predicted ms": f"{self.stated_ms:.2f}",
            "speed off by": f"{self.speed_off:+.1%}",
            "by lines from before": f"{self.unseen_speed_off:+.1%}",
            "by its own rounds": f"{self.formula_off:+.1%}",
            "served gain": f"{self.plain.ms_per_token / self.rounds.ms_per_token:.3f}",
            "gain off by": f"{self.gain_off:+.1%}",
        }


def summary_rows(cells: Sequence[GridCell]) -> list[dict[str, object]]:
    """Return the median and the greatest error of each figure, and the share of cells within its bar."""
    figures = (
        ("tokens a round", [cell.tokens_off for cell in cells], TOKENS_BAR),
        ("speed, lines of the services", [cell.speed_off for cell in cells], SPEED_BAR),
        ("speed, times of the cell's own rounds", [cell.formula_off for cell in cells], SPEED_BAR),
        ("speed, lines from before", [cell.unseen_speed_off for cell in cells], SPEED_BAR),
        ("gain, lines from before", [cell.gain_off for cell in cells], SPEED_BAR),
    )
    return [
        {
            "figure": name,
            "cells": len(values),
            "median error": f"{median(values):+.1%}",
            "median of its size": f"{median(map(abs, values)):.1%}",
            "greatest": f"{max(values, key=abs):+.1%}",
            "bar": f"{bar:.0%}",
            "within": f"{sum(abs(value) <= bar for value in values)} of {len(values)}",
        }
        for name, values, bar in figures
        if values
    ]
