"""A plan's plots, as SVG documents (matplotlib, of `paceline[bench]`)."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from paceline_lab.predict.positions import DrafterPositions
from paceline_lab.predict.rounds import ExpectedRounds, ProposalShape, expected_rounds, longest_depth

BINS = 10
LABEL_CHARACTERS = 36
"""Most characters of a name in a legend."""


def _svg(draw: Any, title: str, x: str, y: str, size: tuple[float, float] = (7.0, 3.8)) -> str:
    """Draw a plot; the same figures give the same bytes."""
    matplotlib: Any = import_module("matplotlib")
    figures: Any = import_module("matplotlib.figure")
    with matplotlib.rc_context({"svg.hashsalt": title, "font.size": 9}):
        figure = figures.Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.set_title(title)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(*_short_labels(*axes.get_legend_handles_labels()), fontsize=8)
        svg = io.StringIO()
        figure.savefig(svg, format="svg", metadata={"Date": None})
    return svg.getvalue()


def _short_labels(handles: Sequence[Any], names: Sequence[str]) -> tuple[Sequence[Any], list[str]]:
    """Return names, without their middles where a plot has no room for them."""
    half = LABEL_CHARACTERS // 2
    return handles, [name if len(name) <= LABEL_CHARACTERS else f"{name[:half]}…{name[-half:]}" for name in names]


def tokens_by_length(chains: Mapping[str, Sequence[ExpectedRounds]], title: str) -> str:
    """Plot tokens a round over k, a line for each drafter; bars are one standard error over texts."""

    def draw(axes: Any) -> None:
        for name, chain in chains.items():
            depths = [each.shape.depth for each in chain]
            axes.errorbar(
                depths, [each.tokens for each in chain], [each.error for each in chain], label=name, marker="o", ms=3
            )

    return _svg(draw, title, "tokens proposed (k)", "tokens a round, predicted")


def gain_by_load(gains: Mapping[str, Sequence[tuple[int, float]]], title: str) -> str:
    """Plot the best setting's gain over requests at once; target-only is 1."""

    def draw(axes: Any) -> None:
        axes.axhline(1.0, color="black", linewidth=0.8)
        for name, points in gains.items():
            axes.plot([load for load, _ in points], [gain for _, gain in points], label=name, marker="o", ms=3)
        axes.set_xscale("log", base=2)
        loads = sorted({load for points in gains.values() for load, _ in points})
        axes.set_xticks(loads, [str(load) for load in loads])

    return _svg(draw, title, "requests at once", "tokens per second over target-only, predicted")


def calibration(positions: Mapping[str, Sequence[DrafterPositions]], title: str) -> str:
    """Plot how often first choices are right by the drafter's confidence; the diagonal is perfect calibration."""
    numpy: Any = import_module("numpy")

    def draw(axes: Any) -> None:
        axes.plot([0, 1], [0, 1], color="black", linewidth=0.8)
        for name, texts in positions.items():
            confidence = numpy.concatenate([each.confidence[each.offered > 0] for each in texts])
            right = numpy.concatenate([each.accepted[each.offered > 0] for each in texts])
            place = numpy.minimum((confidence * BINS).astype(int), BINS - 1)
            counts = numpy.bincount(place, minlength=BINS)
            has_positions = counts > 0
            means = numpy.bincount(place, right, BINS)[has_positions] / counts[has_positions]
            axes.plot(
                numpy.bincount(place, confidence, BINS)[has_positions] / counts[has_positions],
                means,
                label=name,
                marker="o",
                ms=3,
            )

    return _svg(draw, title, "confidence in the first choice", "share that is right")


def chains_of(positions: Sequence[DrafterPositions], most: int) -> list[ExpectedRounds]:
    """Replay chains of 1 … `most` tokens, as deep as the drafter's positions are."""
    return [expected_rounds(positions, ProposalShape(k)) for k in range(1, min(most, longest_depth(positions)) + 1)]
