"""The model drafter's state of one session."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from draft_service.drafters.branch import Branch
from draft_service.drafters.draws import Draws
from draft_service.drafters.shadow import ShadowLog
from draft_service.drafters.shape import Shape, shape_of
from draft_service.drafters.tree import DraftTree, Node
from paceline.costs.acceptance import TokenAcceptance
from paceline.engine.interface import Logits
from paceline.protocol.draft import DraftBudget
from paceline.protocol.errors import PacelineError
from paceline.protocol.proposal import Acceptance
from paceline.sampling.processors import Processors

logger = logging.getLogger(__name__)

MIN_RANKS = 8
"""Guesses that are kept of every row, so that a larger budget needs no row again."""


@dataclass
class SessionState:
    """One session: its tree, and all that its drafts depend on.

    `most` is the number of tokens up to which it may ever draft. `proposed` is the branch that a round can name.
    `reach` is the number of rows after the last one with features that can still predict; None: any number.
    `calibration` is shared by the sessions of one acceptance rule. It has learned from the rows before `learned_end`,
    once each, though rows are computed again when the target's features come. `processors` have read
    `followed_tokens` committed tokens; None: logits are not processed before temperature, or can't be followed here.
    """

    tree: DraftTree
    draws: Draws
    calibration: TokenAcceptance
    acceptance: Acceptance
    most: int
    reach: int | None = None
    ranks: int = MIN_RANKS
    proposed: Branch | None = None
    processors: Processors | None = None
    followed_tokens: int = 0
    learned_end: int = 0
    shadow: ShadowLog = field(default_factory=ShadowLog)

    @property
    def longest(self) -> int:
        """The number of tokens up to which it drafts now; 0 where rows read features and there are none."""
        if self.tree.reads_features and not self.tree.features_end:
            return 0
        return self.most if self.reach is None else min(self.most, self.tree.features_end + self.reach + 1)

    def commit(self, token_ids: Sequence[int], *, shadow: bool) -> None:
        """Append committed tokens; `shadow`: their rows are to be computed with logits."""
        node: Node | None = self.tree.root
        self.shadow.commit(self.tree.root.position, is_asked=shadow)
        for token in token_ids:
            if node is not None:
                self._compare(node, token)
                node = node.children.get(token)
        self.tree.commit(token_ids)
        if not shadow:
            self.follow(len(self.tree.committed))

    def compare(self, lag_nodes: Sequence[Node]) -> None:
        """Compare computed rows of committed tokens with the tokens after them."""
        for node in lag_nodes:
            self._compare(node, self.tree.committed[node.position + 1])

    def _compare(self, node: Node, token: int) -> None:
        """Add a row's shadow and calibrate by it.

        Rows that have not read the target's features have no shadow, since it tells how a round would begin.
        """
        if node.distribution is not None:
            standing = self.draws.standing(node.distribution, token)
            if self.tree.is_final(node):
                self.shadow.add(node.position + 1, standing)
            if not self.draws.pre_drawn and node.position >= self.learned_end:
                self.calibration.take_rank(standing.rank, standing.probability)
                self.learned_end = node.position + 1

    def lag_nodes(self, lag_rows: int) -> list[Node]:
        """Those of the next `lag_rows` committed tokens before the root whose logits the shadow needs."""
        start_row = self.shadow.start_row
        return [] if start_row is None else self.tree.lag_nodes(lag_rows, start_row)

    def may_compute(self, node: Node) -> bool:
        """Whether there is a row for a node, and use for its logits."""
        return node.position < self.longest

    def follow(self, length: int) -> None:
        """Advance the processors by the committed tokens up to `length`; processors that can't follow are dropped."""
        new = self.tree.committed[self.followed_tokens : length]
        if self.processors is None or not new:
            return
        self.followed_tokens += len(new)
        try:
            self.processors.advance(new)
        except PacelineError as error:
            self._do_without(error)

    def process(self, nodes: Sequence[Node], logits: Logits) -> Logits:
        """The logits [n, V] after nodes, the committed ones first, processed as the target does before temperature.

        A row in which a reduced vocabulary leaves no allowed token keeps its own logits: any guess will do.
        """
        if nodes:
            self.follow(nodes[0].position + 1)
        if self.processors is None or not nodes:
            return logits
        try:
            new_logits = self.processors.process(logits, [*map(self._unread_path, nodes)])
        except PacelineError as error:
            self._do_without(error)
            return logits
        dead_rows = np.isneginf(new_logits.max(axis=1))
        new_logits[dead_rows] = logits[dead_rows]
        return new_logits

    def _unread_path(self, node: Node) -> list[int]:
        """The tokens up to a node that the processors have not read."""
        committed = self.tree.committed[self.followed_tokens : node.position + 1]
        return committed if node.position < len(self.tree.committed) else committed + self.tree.path(node)

    def _do_without(self, error: PacelineError) -> None:
        logger.info("drafting without the chain before temperature: %s", error.for_log)
        self.processors = None

    def shape(self, budget: DraftBudget, root: Node) -> Shape:
        """The shape of a proposal below `root`."""
        return shape_of(budget, self.acceptance, self.longest - root.position - 1)

    def least_chance(self, budget: DraftBudget, shape: Shape) -> float:
        """The chance below which a proposal drafted just in time ends; 0 where no choice may depend on q."""
        return 0.0 if self.draws.pre_drawn or shape.widths else budget.least_chance

    def prepare_for(self, budget: DraftBudget) -> None:
        """Keep as many guesses of each row as a budget needs; rows with fewer are computed again."""
        ranks = budget.fan_out + self.shape(budget, self.tree.root).widest
        if ranks > self.ranks:
            self.ranks = ranks
            self.tree.forget()
