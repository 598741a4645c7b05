"""What the model drafter holds of one session."""

from __future__ import annotations

from dataclasses import dataclass

from draft_service.drafters.branch import Branch
from draft_service.drafters.calibration import Calibration
from draft_service.drafters.draws import Draws
from draft_service.drafters.shape import Shape, shape_of
from draft_service.drafters.tree import DraftTree, Node
from paceline.types import Acceptance, DraftBudget

MIN_RANKS = 8
"""Guesses kept of every row, so that budgets can change without computing rows again."""


@dataclass
class SessionState:
    """`longest` is the number of tokens up to which it drafts, `proposed` the branch that a round can name.

    `calibration` is shared by the sessions of one acceptance rule.
    """

    tree: DraftTree
    draws: Draws
    calibration: Calibration
    acceptance: Acceptance
    longest: int
    ranks: int = MIN_RANKS
    proposed: Branch | None = None

    def shape(self, budget: DraftBudget, root: Node) -> Shape:
        """Of a proposal that hangs from `root`."""
        return shape_of(budget, self.acceptance, self.longest - root.position - 1)

    def prepare_for(self, budget: DraftBudget) -> None:
        """Keep as many guesses of each row as a budget needs; rows of which fewer were kept are computed again."""
        ranks = budget.fan_out + self.shape(budget, self.tree.root).widest
        if ranks > self.ranks:
            self.ranks = ranks
            self.tree.forget()
