"""Replay: tokens of rounds of any length or static tree, in texts that were read. Pure.

Positions draw noise of their own, so with the text given each is accepted independently of the others, with the
chance that the passes found (docs/exactness.md §7). A round of depth k ends at its first failure, after k + 1 tokens
or where the text ends; where the next begins is a Markov chain along the text, whose expectation is computed, not
drawn. Every text counts for every shape, however short it is, so that shapes are compared on the same texts. In a
static tree the path that goes on is the text's own, so a tree of widths w is a chain whose token at depth d is
accepted if it is among the drafter's first w_d choices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.costs.acceptance import FAN_OUT
from paceline.protocol.errors import InvalidInput, require
from paceline.protocol.proposal import MAX_PROPOSAL_NODES
from paceline_lab.predict.figures import RANKS
from paceline_lab.predict.positions import ABSENT, DrafterPositions, TextPositions
from paceline_training.evaluate import round_flow

RESAMPLES = 400
"""Resamples of the texts, for the standard error of tokens a round."""


@dataclass(frozen=True)
class ProposalShape:
    """The proposal of each round: a chain of `depth` tokens, or a static tree whose nodes have `widths` children.

    Raises:
        InvalidInput: too deep, too wide, or with too many nodes.
    """

    depth: int
    widths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require(0 <= self.depth <= MAX_PROPOSAL_NODES, "k", self.depth, f"in [0, {MAX_PROPOSAL_NODES}]")
        require(len(self.widths) <= self.depth, "tree widths", self.widths, f"at most {self.depth}, one a depth")
        fits = all(1 <= width <= RANKS for width in self.widths)
        require(fits, "tree widths", self.widths, f"in [1, {RANKS}]")
        require(self.nodes <= MAX_PROPOSAL_NODES, "tree nodes", self.nodes, f"at most {MAX_PROPOSAL_NODES}")

    @classmethod
    def parse(cls, text: str) -> ProposalShape:
        """Read `4`, or `4:3-2`: a tree of depth 4 whose root has 3 children, and each of them 2.

        Raises:
            InvalidInput: the text is neither.
        """
        depth, _, widths = text.partition(":")
        parts = widths.split("-") if widths else []
        if not all(part.isdecimal() for part in (depth, *parts)):
            raise InvalidInput.of("k", text, "a number, or DEPTH:WIDTH-WIDTH such as 4:3-2")
        return cls(int(depth), tuple(map(int, parts)))

    @property
    def name(self) -> str:
        """Return the name that tables show."""
        tree = "-".join(map(str, self.widths))
        return f"k={self.depth}" + (f" tree {tree}" if tree else "")

    def width(self, depth: int) -> int:
        """Return the number of children of each node whose children are at `depth`, which counts from 1."""
        return self.widths[depth - 1] if depth <= len(self.widths) else 1

    def level(self, depth: int) -> int:
        """Return the number of nodes at a depth; at depth 0 is the root."""
        nodes = 1
        for above in range(1, depth + 1):
            nodes *= self.width(above)
        return nodes

    @property
    def nodes(self) -> int:
        """Return the number of nodes of all depths."""
        return sum(self.level(depth) for depth in range(1, self.depth + 1))


@dataclass(frozen=True)
class ExpectedRounds:
    """Expected figures of rounds of one shape.

    Attributes:
        tokens: tokens that a round commits, the target's own included; a round that the text's end cuts has fewer.
        error: standard error of `tokens` from one sample of texts to another, by bootstrap; NaN of a single text.
        survival: shares of rounds whose first 1 … depth tokens are accepted.
        proposed: (nodes, share of the rounds that propose so many).
        hits: share of rounds whose outcome is among those that a fan-out of `FAN_OUT` drafts for; 0 of trees.
    """

    shape: ProposalShape
    tokens: float
    error: float = 0.0
    survival: tuple[float, ...] = ()
    proposed: tuple[tuple[int, float], ...] = ((0, 1.0),)
    hits: float = 0.0

    @property
    def nodes(self) -> float:
        """Return the mean number of nodes that a round proposes."""
        return sum(nodes * share for nodes, share in self.proposed)


@dataclass(frozen=True, eq=False)
class _TextRounds:
    """One text's expected sums over its rounds, which commit all its positions."""

    positions: int
    rounds: float
    survival: NDArray[np.float64]  # [depth]
    hits: float
    proposed: Counter[int]


def longest_depth(drafters: Iterable[DrafterPositions]) -> int:
    """Return how deep rounds can be replayed: a drafter that reads features was read to a certain depth alone."""
    depths = [each.reach.shape[1] for each in drafters if each.reach.shape[1] > 1]
    return int(min([MAX_PROPOSAL_NODES, *depths]))


def expected_rounds(drafters: Sequence[DrafterPositions], shape: ProposalShape, scale: float = 1.0) -> ExpectedRounds:
    """Replay rounds of one shape over the same drafter's positions in all texts.

    Args:
        drafters: the drafter's positions in each text.
        shape: chain or tree.
        scale: factor on every chance of acceptance, which stays at most 1: "what if it were so much better".

    Raises:
        InvalidInput: deeper than the drafter was replayed, or no text with a position.
    """
    if shape.depth == 0:
        return ExpectedRounds(shape, 1.0)
    most = longest_depth(drafters)
    require(shape.depth <= most, "k", shape.depth, f"at most {most}, as deep as the drafter was replayed")
    require(any(len(each.ranks) for each in drafters), "positions", 0, "at least 1, over all texts")
    texts = [_text_rounds(each, shape, scale) for each in drafters]
    rounds = np.array([each.rounds for each in texts])
    committed = np.array([each.positions for each in texts], np.float64)
    total = float(rounds.sum())
    proposals = sum((each.proposed for each in texts), Counter[int]())
    return ExpectedRounds(
        shape,
        float(committed.sum() / total),
        _standard_error(committed, rounds),
        tuple((np.sum([each.survival for each in texts], axis=0) / total).tolist()),
        tuple((nodes, share / total) for nodes, share in sorted(proposals.items())),
        sum(each.hits for each in texts) / total,
    )


def _text_rounds(drafter: DrafterPositions, shape: ProposalShape, scale: float) -> _TextRounds:
    depths = np.arange(shape.depth)
    reach = np.minimum(1.0, scale * drafter.reach)  # [n, depths, RANKS]
    columns = np.minimum(depths, reach.shape[1] - 1)
    widths = np.array([shape.width(int(depth) + 1) for depth in depths])
    accepted = reach[:, columns, widths - 1]  # [n, depth]
    begins, survival = round_flow(accepted, shape.depth)
    sizes = np.array([_nodes_of(shape, int(tokens)) for tokens in drafter.offered])
    proposed: Counter[int] = Counter()
    for size, chance in zip(sizes.tolist(), begins.tolist(), strict=True):
        proposed[size] += chance
    hits = 0.0 if shape.widths else float(begins @ _hits(reach, survival))
    return _TextRounds(begins.size, float(begins.sum()), begins @ survival, hits, proposed)


def _nodes_of(shape: ProposalShape, tokens: int) -> int:
    """Return the nodes of a round where so many tokens are on offer; matches are chains."""
    return shape.nodes if tokens >= shape.depth else tokens


def _hits(reach: NDArray[np.float64], survival: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the chance that the outcome of a round that begins at a position was drafted for, [positions].

    After a mismatch it is one of the next `FAN_OUT` ranks, after a whole proposal one of the first. A text's last
    round has none.
    """
    positions, k = survival.shape
    before = np.concatenate([np.ones((positions, 1)), survival[:, :-1]], axis=1)  # chance to get to each depth
    inside = np.concatenate([reach, np.zeros((k + 1, *reach.shape[1:]))])
    at = np.arange(positions)[:, None] + np.arange(k)
    columns = np.minimum(np.arange(k), reach.shape[1] - 1)
    beside = inside[at, columns, FAN_OUT] - inside[at, columns, 0]
    bonus = inside[k : k + positions, min(k, reach.shape[1] - 1), FAN_OUT - 1]
    return np.asarray((before * beside).sum(axis=1) + survival[:, -1] * bonus)


def _standard_error(committed: NDArray[np.float64], rounds: NDArray[np.float64]) -> float:
    """Return the standard error of Σ committed / Σ rounds, by resampling texts; a single text has none."""
    has_rounds = rounds > 0
    committed, rounds = committed[has_rounds], rounds[has_rounds]
    if rounds.size < 2:
        return ABSENT
    resamples = np.random.default_rng(0).integers(0, rounds.size, (RESAMPLES, rounds.size))
    return float((committed[resamples].sum(axis=1) / rounds[resamples].sum(axis=1)).std())


def plus_minus(error: float, digits: int = 2) -> str:
    """Return a standard error as it stands behind its figure; nothing where it is not known."""
    return "" if math.isnan(error) else f" ± {error:.{digits}f}"


def positions_of(texts: Sequence[TextPositions], drafter: str, temperature: float) -> list[DrafterPositions]:
    """Return one drafter's positions in the texts of a temperature."""
    return [text.drafters[drafter] for text in texts if text.temperature == temperature]
