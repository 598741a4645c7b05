"""What the model drafter holds of one session."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draft_service.drafters.branch import Branch
from draft_service.drafters.calibration import Calibration
from draft_service.drafters.draws import Draws
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

    `longest` is the number of tokens up to which it drafts, `proposed` the branch that a round can name.
    `calibration` is shared by the sessions of one acceptance rule. `processors` are at the tree's root;
    None: logits go through nothing before temperature, or through something that can't be followed here.
    """

    tree: DraftTree
    draws: Draws
    calibration: Calibration
    acceptance: Acceptance
    longest: int
    ranks: int = MIN_RANKS
    proposed: Branch | None = None
    processors: Processors | None = None

    def follow(self, token_ids: Sequence[int]) -> None:
        """Take in committed tokens; processors that can't follow them are dropped."""
        if self.processors is not None:
            try:
                self.processors.advance(token_ids)
            except PacelineError as error:
                self._do_without(error)

    def processed(self, nodes: Sequence[Node], logits: Logits) -> Logits:
        """The logits [n, V] after nodes, processed as the target does before temperature.

        A row in which a reduced vocabulary leaves no allowed token keeps its own logits: any guess will do.
        """
        if self.processors is None or not nodes:
            return logits
        try:
            processed = self.processors.process(logits, [self.tree.path(node) for node in nodes])
        except PacelineError as error:
            self._do_without(error)
            return logits
        lost = np.isneginf(processed.max(axis=1))
        processed[lost] = logits[lost]
        return processed

    def _do_without(self, error: PacelineError) -> None:
        logger.info("drafting without the chain before temperature: %s", error.for_log)
        self.processors = None

    def shape(self, budget: DraftBudget, root: Node) -> Shape:
        """The shape of a proposal that hangs from `root`."""
        return shape_of(budget, self.acceptance, self.longest - root.position - 1)

    def prepare_for(self, budget: DraftBudget) -> None:
        """Keep as many guesses of each row as a budget needs; rows of which fewer were kept are computed again."""
        ranks = budget.fan_out + self.shape(budget, self.tree.root).widest
        if ranks > self.ranks:
            self.ranks = ranks
            self.tree.forget()
