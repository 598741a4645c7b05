"""How alike the named distributions are, beside a real model's text: `python -m benchmarks.likeness`.

Columns of a target p and a draft q of it at temperature 1, means over contexts:

- overlap: 1 - TV.
- best m: the target's token is among the draft's m best under the noise that both race; m = 1 is the
  coupled match, which is what a chain accepts.
- after a mismatch, best m: the draft's first was wrong, the target's is among its next m.
- top m: p's mass on the draft's m most probable ids, which is the best guess without shared noise.

`--fit` searches for the parameters that `paceline.models.table_names.LAWS` holds, `--match LAW=MATCH` for
the `disturb` with which a law's coupled match is that.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, minimize

from benchmarks.reporting.environment import as_markdown, describe
from benchmarks.simulated.distributions import Table, chances, law_match, raced_ranks, table_of
from paceline.models.table_names import LAWS, TableSpec

GUESSES = (1, 2, 4, 8)
DRAFTS = ("close", "middling", "poor")


@dataclass(frozen=True)
class Columns:
    """How a draft relates to its target; tuples have an entry for each of `GUESSES`."""

    overlap: float
    best: tuple[float, ...]
    after_mismatch: tuple[float, ...]
    top: tuple[float, ...]

    @property
    def values(self) -> NDArray[np.float64]:
        """All thirteen in one row."""
        return np.array([self.overlap, *self.best, *self.after_mismatch, *self.top])


MEASURED = {
    "close": Columns(0.909, (0.889, 0.972, 0.997, 1.0), (0.751, 0.925, 0.987, 0.999), (0.548, 0.665, 0.758, 0.826)),
    "middling": Columns(
        0.746, (0.714, 0.866, 0.946, 0.986), (0.530, 0.715, 0.876, 0.958), (0.502, 0.627, 0.722, 0.796)
    ),
    "poor": Columns(0.468, (0.426, 0.572, 0.709, 0.833), (0.255, 0.400, 0.569, 0.737), (0.362, 0.470, 0.590, 0.676)),
}
"""SmolLM2-135M on its own text, 1,100 positions with 8 draws of noise each; the drafts are the model
with disturbed weights or dropped layers."""


def columns(target: Table, draft: Table, ranks: NDArray[np.int64]) -> Columns:
    """The columns of a pair; `ranks` are the target's tokens' ranks under shared noise, 1 the best."""
    p, q = _softmax(target), _softmax(draft)
    guessed = [chances(ranks, m) for m in GUESSES]
    likeliest = np.argsort(-q, axis=1)[:, : max(GUESSES)]
    mass = np.take_along_axis(p, likeliest, axis=1).cumsum(axis=1).mean(axis=0)
    return Columns(
        overlap=float(np.minimum(p, q).sum(axis=1).mean()),
        best=tuple(bonus for bonus, _ in guessed),
        after_mismatch=tuple(recovered for _, recovered in guessed),
        top=tuple(float(mass[m - 1]) for m in GUESSES),
    )


def disturb_for(law: str, match: float) -> float:
    """The `disturb` with which a named law's coupled match at temperature 1 is `match`, to three digits."""
    least, most = 0.01, 5.0
    found = brentq(lambda disturb: law_match(f"law={law},disturb={disturb}", 1.0) - match, least, most, xtol=1e-3)
    return float(f"{found:.3g}")


def _softmax(logits: Table) -> NDArray[np.float64]:
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True), np.float64)


FITTED = ("disturb", "disturb_spread", "disturb_tail")
DRAFT_WEIGHTS = {"close": 1.0, "middling": 1.0, "poor": 0.2}
WEIGHTS = np.array([2, 2, 2, 2, 2, 1, 1, 1.5, 1, 0.3, 0.3, 0.3, 0.3])
"""Of the columns, in the order of `Columns.values`."""
CONTEXTS = 1024
"""Contexts of the search; their mixture doesn't depend on their number."""


class Search:
    """Nelder-Mead from today's laws; least squares over the weighted columns.

    The normals behind the tables are drawn once and scaled for each candidate.
    A point is (sharpness, sharpness_spread, then `FITTED` of each draft).
    """

    def __init__(self, draws: int) -> None:
        self._text = TableSpec.parse("law=text")
        rng = np.random.default_rng(0)
        shape = (CONTEXTS, self._text.vocab)
        self._logits, self._off, self._scale = (rng.standard_normal(shape).astype(np.float32) for _ in range(3))
        self._noise = [rng.gumbel(size=shape).astype(np.float32) for _ in range(draws)]
        normal = [NormalDist().inv_cdf((i + 0.5) / CONTEXTS) for i in range(CONTEXTS)]
        self._sharper, self._further = (rng.permutation(normal)[:, np.newaxis] for _ in range(2))

    def run(self, evaluations: int) -> dict[str, TableSpec]:
        """The laws found."""
        start = [self._text.sharpness, self._text.sharpness_spread]
        for name in DRAFT_WEIGHTS:
            spec = TableSpec.parse(f"law={name}")
            start += [getattr(spec, key) for key in FITTED]
        found = minimize(self._loss, start, method="Nelder-Mead", options={"maxfev": evaluations, "adaptive": True})
        text = replace(self._text, sharpness=float(found.x[0]), sharpness_spread=float(found.x[1]))
        return {"text": text} | {
            name: replace(text, disturb=float(point[0]), disturb_spread=float(point[1]), disturb_tail=float(point[2]))
            for name, point in zip(DRAFT_WEIGHTS, found.x[2:].reshape(-1, 3), strict=True)
        }

    def _loss(self, point: NDArray[np.float64]) -> float:
        if point.min() < 0:
            return float("inf")
        target = (point[0] * np.exp(point[1] * self._sharper)).astype(np.float32) * self._logits
        total = 0.0
        for (name, weight), own in zip(DRAFT_WEIGHTS.items(), point[2:].reshape(-1, 3), strict=True):
            draft = target + self._disturbance(*own.tolist())
            found = columns(target, draft, self._ranks(target, draft))
            total += weight * float((WEIGHTS * (found.values - MEASURED[name].values) ** 2).sum())
        return total

    def _disturbance(self, disturb: float, spread: float, tail: float) -> Table:
        level = (disturb * np.exp(spread * self._further)).astype(np.float32)
        return np.asarray(level * self._off * np.exp(tail * self._scale - tail**2, dtype=np.float32), np.float32)

    def _ranks(self, target: Table, draft: Table) -> NDArray[np.int64]:
        """As `raced_ranks`, of ready-made Gumbel rows."""
        rows = np.arange(len(target))
        found = []
        for gumbel in self._noise:
            perturbed = draft + gumbel
            of_token = perturbed[rows, (target + gumbel).argmax(axis=1)]
            found.append(1 + (perturbed > of_token[:, np.newaxis]).sum(axis=1))
        return np.concatenate(found)


def report(laws: dict[str, TableSpec], draws: int) -> str:
    """Each draft's columns, raced, above what was measured."""
    target = table_of(laws["text"])
    lines = ["| draft | overlap | best 1 / 2 / 4 / 8 | after a mismatch 1 / 2 / 4 / 8 | top 1 / 2 / 4 / 8 |"]
    lines.append("|---|---|---|---|---|")
    for name in DRAFTS:
        draft = table_of(laws[name])
        found = columns(target, draft, raced_ranks(target, draft, draws))
        lines += [_row(name, found), _row("measured", MEASURED[name])]
    return "\n".join(lines) + "\n"


def _row(name: str, found: Columns) -> str:
    groups = ((found.overlap,), found.best, found.after_mismatch, found.top)
    cells = [" / ".join(f"{value:.3f}" for value in group) for group in groups]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Print the columns of the named laws, or of fitted ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=8, help="Draws of noise in each context.")
    parser.add_argument("--fit", type=int, default=0, help="Evaluations of the search; 0: none.")
    parser.add_argument("--match", metavar="LAW=MATCH", nargs="+", help="Print the disturb of each and no more.")
    parser.add_argument("--out", type=Path, help="Folder for the report.")
    arguments = parser.parse_args()
    if arguments.match:
        for law, _, match in (each.partition("=") for each in arguments.match):
            print(f"law={law},disturb={disturb_for(law, float(match)):g}")
        return
    laws = {name: TableSpec.parse(f"law={name}") for name in LAWS}
    if arguments.fit:
        laws = Search(arguments.draws).run(arguments.fit)
    names = "".join(f"- {name}: `{spec.law}`\n" for name, spec in laws.items())
    text = f"# Table laws\n\n{as_markdown(describe())}\n{names}\n{report(laws, arguments.draws)}"
    if arguments.out:
        (arguments.out / "laws.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
