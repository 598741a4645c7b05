"""How often the tables of a target and of its drafts predict the same token."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.engine.table.engine import TableModel
from paceline.models.table_names import TableSpec
from paceline.protocol.sampling import NoiseKey
from paceline.sampling.noise import Stream
from paceline.sampling.racing import race, race_best

MOST_GUESSES = 8
"""Most guesses behind a wrong one whose ranks are distinguished."""

Table = NDArray[np.float32]
"""Logits [contexts, V]."""

DRAFT_OF_ACCEPTANCE = {
    0.6: "distribution=middling,disturb=1.35",
    0.8: "distribution=middling,disturb=0.663",
    0.9: "distribution=close,disturb=0.316",
    0.95: "distribution=close,disturb=0.154",
}
"""Drafts whose coupled match at temperature 1 is the key: a named distribution with another `disturb`.

Each `disturb` is the root, to three digits, of `coupled_match` less the key; `tests/lab/test_overlap.py`
checks them."""
MATCH_DRAWS = 4


def table_of(spec: TableSpec) -> Table:
    """Return every row of a distribution's table."""
    model = TableModel(spec)
    return np.stack([model.context(row) for row in range(spec.contexts)])


def raced_ranks(target: Table, draft: Table, draws: int, seed: int = 0) -> NDArray[np.int64]:
    """Return ranks [draws · contexts] by the services' own race; beyond the tenth best all count as the tenth."""
    last = MOST_GUESSES + 2
    ranks = []
    for draw in range(draws):
        key = NoiseKey(seed, draw)
        for position, (p, q) in enumerate(zip(target, draft, strict=True)):
            token = race(p, key, Stream.DRAFT, position)
            best = race_best(q, last - 1, key, Stream.DRAFT, position)
            ranks.append(1 + best.index(token) if token in best else last)
    return np.array(ranks)


def coupled_match(draft_distribution: str, temperature: float) -> float:
    """Return how often a draft has the target's token first: coupled at temperature 1, greedy at 0."""
    target, draft = (table_of(TableSpec.parse(name)) for name in ("distribution=text", draft_distribution))
    if not temperature:
        return float((target.argmax(axis=1) == draft.argmax(axis=1)).mean())
    return float((raced_ranks(target / temperature, draft / temperature, MATCH_DRAWS) == 1).mean())
