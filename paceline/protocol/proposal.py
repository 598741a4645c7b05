"""Proposals, the outcomes of rounds, and the rules that accept."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

from paceline.protocol.errors import require, require_ids

MAX_PROPOSAL_NODES = 64
MAX_SUPPORT_ENTRIES = 256
SUPPORT_SUM_TOLERANCE = 1e-3
MAX_DRAFTER_BYTES = 512
"""Most bytes of a drafter's name. Every round's record repeats it, and those of a whole text must fit one message."""
AUTO = "auto"
"""Drafter of requests that leave the choice to the coordinator's policy."""
NGRAM = "ngram"
"""The coordinator's own drafter: suffix matches over prompt and output."""
PREDICTION = "prediction"
"""The coordinator's own drafter of requests that predict their output."""
SHARED = "shared"
"""The coordinator's own drafter: matches in texts that the tenant's requests finished before."""
CORPUS = "corpus"
"""The coordinator's own drafter: matches in the files that it was started with."""
COPYING = (NGRAM, PREDICTION, SHARED, CORPUS)
"""Drafters of the coordinator's own, whose tokens are certain of themselves."""
MODEL = "model"
"""Drafter of a draft service: `model` is its first, `model:NAME` the one that it was started with as NAME."""
OWN_MTP = "mtp"
"""Name of the draft that is the target checkpoint's own multi-token prediction; a folder of that name is `./mtp`."""
NONE = "none"
"""No drafter: every round is target-only."""
ROOT = -1
"""The parent of a proposal's first nodes: the last committed token."""


class Acceptance(Enum):
    """The rule that turns a proposal and a verdict into committed tokens; `exactness` §1d says what each trusts."""

    COUPLED = "coupled"
    REJECTION = "rejection"
    BLOCK = "block"


@dataclass(frozen=True)
class SparseDistribution:
    """q over the tokens that one drafted token was really sampled from (float32 values)."""

    token_ids: tuple[int, ...]
    probabilities: tuple[float, ...]

    def __post_init__(self) -> None:
        entries = len(self.token_ids)
        require(1 <= entries <= MAX_SUPPORT_ENTRIES, "support entries", entries, f"in [1, {MAX_SUPPORT_ENTRIES}]")
        same = len(self.probabilities) == entries
        require(same, "support probabilities", len(self.probabilities), f"{entries}, one for each id")
        ascending = all(a < b for a, b in zip(self.token_ids, self.token_ids[1:], strict=False))
        require(ascending and self.token_ids[0] >= 0, "support token_ids", self.token_ids, "strictly ascending")
        positive = all(q > 0 and math.isfinite(q) for q in self.probabilities)
        require(positive, "support probabilities", min(self.probabilities), "positive and finite")
        total = math.fsum(self.probabilities)
        in_tolerance = abs(total - 1) <= SUPPORT_SUM_TOLERANCE
        require(in_tolerance, "sum of support probabilities", total, f"1 within {SUPPORT_SUM_TOLERANCE:g}")

    def probability(self, token_id: int) -> float:
        """q(token_id); 0 outside the support."""
        return dict(zip(self.token_ids, self.probabilities, strict=True)).get(token_id, 0.0)


@dataclass(frozen=True)
class Proposal:
    """Proposed tokens: a chain, or a tree in topological order.

    `parents[i]` is the index of node i's parent, `ROOT` for a child of the last
    committed token; a chain's parents are (-1, 0, 1, …). `supports` is empty
    unless the acceptance is rejection or block.
    """

    proposal_id: int
    token_ids: tuple[int, ...]
    draft_probabilities: tuple[float, ...]
    parents: tuple[int, ...] = ()
    supports: tuple[SparseDistribution, ...] = ()
    drafter: str = ""

    def __post_init__(self) -> None:
        nodes = len(self.token_ids)
        require(nodes <= MAX_PROPOSAL_NODES, "proposal nodes", nodes, f"at most {MAX_PROPOSAL_NODES}")
        if not self.parents:
            object.__setattr__(self, "parents", tuple(range(-1, nodes - 1)))
        require(len(self.parents) == nodes, "proposal parents", len(self.parents), f"{nodes}, one for each node")
        for node, parent in enumerate(self.parents):
            require(ROOT <= parent < node, f"proposal parent of node {node}", parent, f"in [-1, {node - 1}]")
        same = len(self.draft_probabilities) == nodes
        require(same, "draft_probabilities", len(self.draft_probabilities), f"{nodes}, one for each node")
        for q in self.draft_probabilities:
            require(math.isfinite(q) and 0 < q <= 1, "draft_probability", q, "in (0, 1]")
        self._check_supports()

    def _check_supports(self) -> None:
        if not self.supports:
            return
        require(self.is_chain, "proposal parents", self.parents, "a chain when supports are given")
        same = len(self.supports) == len(self.token_ids)
        require(same, "proposal supports", len(self.supports), f"{len(self.token_ids)}, one for each node")
        for token_id, q, support in zip(self.token_ids, self.draft_probabilities, self.supports, strict=True):
            support_q = support.probability(token_id)
            require(support_q > 0, f"q of drafted token {token_id}", support_q, "positive in its support")
            require(abs(support_q - q) <= 1e-6, f"q of drafted token {token_id}", q, f"its support's {support_q!r}")

    def check_for(self, acceptance: Acceptance, vocab_size: int) -> None:
        """Refuse what a target can't verify.

        Raises:
            InvalidInput: a token outside the vocabulary, supports under coupled acceptance, or, under another rule,
                a tree or nodes without supports.
        """
        require_ids("proposal token_ids", self.token_ids, vocab_size)
        supports = len(self.supports)
        if acceptance is Acceptance.COUPLED:
            require(supports == 0, "proposal supports", supports, "0 under coupled acceptance")
            return
        rule = f"under {acceptance.value} acceptance"
        require(self.is_chain, "proposal parents", self.parents, f"a chain {rule}")
        require(supports == len(self), "proposal supports", supports, f"{len(self)}, one for each node, {rule}")
        for support in self.supports:
            require_ids("support token_ids", support.token_ids, vocab_size)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        """Whether every node hangs from the one before it."""
        return self.parents == tuple(range(-1, len(self.token_ids) - 1))

    @property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; the root's children have depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    def first(self, nodes: int) -> Proposal:
        """The same proposal cut to its first nodes; itself if it has no more."""
        if nodes >= len(self):
            return self
        return replace(
            self,
            token_ids=self.token_ids[:nodes],
            draft_probabilities=self.draft_probabilities[:nodes],
            parents=self.parents[:nodes],
            supports=self.supports[:nodes],
        )

    def extends(self, earlier: Proposal | None) -> bool:
        """Whether it begins with the earlier one's tokens and tree; true where there is no earlier one."""
        nodes = len(earlier) if earlier else 0
        mine = self.token_ids[:nodes], self.parents[:nodes]
        return earlier is None or mine == (earlier.token_ids, earlier.parents)

    def within(self, depth: int) -> Proposal:
        """The first nodes, up to the first that is deeper; itself if none is."""
        deeper = (node for node, at in enumerate(self.depths) if at > depth)
        return self.first(next(deeper, len(self)))

    def path(self, node: int) -> tuple[int, ...]:
        """Node indices from the root's child down to `node`; empty for `ROOT`."""
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))


@dataclass(frozen=True)
class Outcome:
    """How a round ended: its base length, the last accepted node, the token after it."""

    base_length: int
    node: int
    next_token: int
