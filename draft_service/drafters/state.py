"""What the model drafter holds of one session."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from draft_service.drafters.branch import Branch
from draft_service.drafters.calibration import Calibration
from draft_service.drafters.draws import Draws
from draft_service.drafters.shadow import ShadowLog
from draft_service.drafters.shape import Shape, shape_of
from draft_service.drafters.tree import DraftTree, Node
from paceline.engine.interface import Logits
from paceline.protocol.draft import DraftBudget
from paceline.protocol.errors import PacelineError
from paceline.protocol.proposal import Acceptance
from paceline.sampling.processors import Processors

logger = logging.getLogger(__name__)

MIN_RANKS = 8
"""Guesses kept of every row, so that budgets can change without computing rows again."""


@dataclass
class SessionState:
    """One session: its tree, and what its drafts depend on.

    `most` is the number of tokens up to which it may ever draft, `proposed` the branch that a round can name. `reach`
    is how many rows behind the last known feature tell what follows them; None: any do.
    `calibration` is shared by the sessions of one acceptance rule; it has learned what followed the rows before
    `learned`, once each, though rows are computed again when the target's features come. `processors` have taken
    `followed` committed tokens in; None: logits go through nothing before temperature, or through something that
    can't be followed here.
    """

    tree: DraftTree
    draws: Draws
    calibration: Calibration
    acceptance: Acceptance
    most: int
    reach: int | None = None
    ranks: int = MIN_RANKS
    proposed: Branch | None = None
    processors: Processors | None = None
    followed: int = 0
    learned: int = 0
    shadow: ShadowLog = field(default_factory=ShadowLog)

    @property
    def longest(self) -> int:
        """The number of tokens up to which it drafts now: where rows read features, none without any."""
        if self.tree.reads_features and not self.tree.known:
            return 0
        return self.most if self.reach is None else min(self.most, self.tree.known + self.reach + 1)

    def commit(self, token_ids: Sequence[int], *, shadow: bool) -> None:
        """Append committed tokens; `shadow`: their rows are to be computed with logits."""
        node: Node | None = self.tree.root
        self.shadow.commit(self.tree.root.position, wanted=shadow)
        for token in token_ids:
            if node is not None:
                self._compare(node, token)
                node = node.children.get(token)
        self.tree.commit(token_ids)
        if not shadow:
            self.follow(len(self.tree.committed))

    def compare(self, lag_nodes: Sequence[Node]) -> None:
        """Rows of committed tokens are computed with logits: see what came behind them."""
        for node in lag_nodes:
            self._compare(node, self.tree.committed[node.position + 1])

    def _compare(self, node: Node, token: int) -> None:
        """Rows that have not read the target's features cast no shadow: it says how a round would begin."""
        if node.distribution is not None:
            standing = self.draws.standing(node.distribution, token)
            if self.tree.is_true(node):
                self.shadow.add(node.position + 1, standing)
            if not self.draws.pre_drawn and node.position >= self.learned:
                self.calibration.observe(standing.probability, standing.rank or None)
                self.learned = node.position + 1

    def lag_nodes(self, lag_rows: int) -> list[Node]:
        """Those of the next `lag_rows` committed tokens, before the root, whose logits the shadow needs."""
        wanted_from = self.shadow.wanted_from
        return [] if wanted_from is None else self.tree.lag_nodes(lag_rows, wanted_from)

    def may_compute(self, node: Node) -> bool:
        """Whether there is a row for it, and use for what it says."""
        return node.position < self.longest

    def follow(self, length: int) -> None:
        """Have processors take in the committed tokens up to `length`; those that can't follow them are dropped."""
        new = self.tree.committed[self.followed : length]
        if self.processors is None or not new:
            return
        self.followed += len(new)
        try:
            self.processors.advance(new)
        except PacelineError as error:
            self._do_without(error)

    def processed(self, nodes: Sequence[Node], logits: Logits) -> Logits:
        """The logits [n, V] after nodes, the committed ones first, processed as the target does before temperature.

        A row in which a reduced vocabulary leaves no allowed token keeps its own logits: any guess will do.
        """
        if nodes:
            self.follow(nodes[0].position + 1)
        if self.processors is None or not nodes:
            return logits
        try:
            processed = self.processors.process(logits, [*map(self._behind_followed, nodes)])
        except PacelineError as error:
            self._do_without(error)
            return logits
        lost = np.isneginf(processed.max(axis=1))
        processed[lost] = logits[lost]
        return processed

    def _behind_followed(self, node: Node) -> list[int]:
        """The path that processors have not taken in."""
        committed = self.tree.committed[self.followed : node.position + 1]
        return committed if node.position < len(self.tree.committed) else committed + self.tree.path(node)

    def _do_without(self, error: PacelineError) -> None:
        logger.info("drafting without the chain before temperature: %s", error.for_log)
        self.processors = None

    def shape(self, budget: DraftBudget, root: Node) -> Shape:
        """The shape of a proposal that hangs from `root`."""
        return shape_of(budget, self.acceptance, self.longest - root.position - 1)

    def least_chance(self, budget: DraftBudget, shape: Shape) -> float:
        """Where a proposal drafted just in time ends; a rule that may not look at q has no such end."""
        return 0.0 if self.draws.pre_drawn or shape.widths else budget.least_chance

    def prepare_for(self, budget: DraftBudget) -> None:
        """Keep as many guesses of each row as a budget needs; rows of which fewer were kept are computed again."""
        ranks = budget.fan_out + self.shape(budget, self.tree.root).widest
        if ranks > self.ranks:
            self.ranks = ranks
            self.tree.forget()
