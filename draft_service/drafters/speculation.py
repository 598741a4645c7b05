"""The outcomes of the round under verification, and the proposals prepared for them, most probable first.

An outcome is an accepted node and the token after it. So it is also a node of the tree: a child that
was not proposed of a node that was. Its proposal is the branch below it. The node that is computed
next is always the one of greatest worth. Its worth is the product of chances along its path, and less
if its branch has a token already.

Rejection and block acceptance: branches that hang from one accepted node share their noise, so the
length of one must not depend on what another drew (`exactness` §3: a branch length chosen by shared
noise is biased). So their order depends on the outcomes' chances and on depth, never on a branch's
tokens, and they begin with none of their rows computed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from draft_service.drafters.branch import Branch, Odds
from draft_service.drafters.draws import NextToken
from draft_service.drafters.interface import PreparedProposal
from draft_service.drafters.state import SessionState
from draft_service.drafters.tree import Node
from paceline.costs.acceptance import HALF, PRIOR_CHANCE
from paceline.protocol.draft import DraftBudget
from paceline.protocol.proposal import ROOT

UNKNOWN_CHANCE = PRIOR_CHANCE
"""Chance of a verified token whose parent's row is not computed: somebody thought it worth a round."""
UNRANKED_CHANCE = 1 - PRIOR_CHANCE
"""Chance of a verified token that is not in the ranking: what the prior leaves to others than the first choice."""
DEEPER = HALF
"""Worth of a further token of a proposal relative to the first, without which the round waits for several steps."""
WORTHLESS = 1e-3
"""Rows of less worth are not computed."""


@dataclass(eq=False)
class _OutcomeBranch:
    """An outcome's branch. Its nodes before `queue_end` were queued; `floor` is the least chance among them."""

    node: int
    weight: float
    branch: Branch
    floor: float
    queue_end: int = ROOT
    proposal_id: int = 0


@dataclass(order=True)
class _Entry:
    """A node whose row is to be computed; without an outcome it is under verification. `urgency`: minus its worth."""

    urgency: float
    order: int
    node: Node = field(compare=False)
    outcome: _OutcomeBranch | None = field(compare=False, default=None)


class Speculation:
    """The proposals that one session prepares while a round is verified.

    Args:
        session: its tree's root is the last committed token.
        round_nodes: the round's nodes, in the proposal's order.
        budget: the number of outcomes for each node, and the size of each outcome's proposal.
        next_id: makes proposal ids.
        drafter: the drafter's name in the proposals.
    """

    def __init__(
        self,
        session: SessionState,
        round_nodes: Sequence[Node],
        budget: DraftBudget,
        next_id: Callable[[], int],
        drafter: str,
    ) -> None:
        self.session = session
        self._tree, self._draws, self._calibration = session.tree, session.draws, session.calibration
        self._budget, self._next_id, self._drafter = budget, next_id, drafter
        self._indices = {node: index for index, node in reversed([*enumerate(round_nodes)])} | {self._tree.root: ROOT}
        self._proposed = _children_among(round_nodes)
        self._chances: dict[Node, float] = {}
        self._rankings: dict[Node, tuple[float, tuple[int, ...]]] = {}
        self._outcomes: dict[Node, _OutcomeBranch] = {}
        self._queue: list[_Entry] = []
        self._step_entries: list[_Entry] = []
        self._growth: dict[_OutcomeBranch, None] = {}
        self._orders = 0
        self._reach(self._tree.root, 1.0)

    @property
    def done(self) -> bool:
        """Whether nothing is left to compute."""
        return not self._queue and not (self._tree.lag and self.session.may_compute(self._tree.root))

    @property
    def best(self) -> float:
        """Worth of the next node to compute; 0: there is none."""
        return -self._queue[0].urgency if self._queue else 0.0

    def take(self) -> Node:
        """Remove and return the node of greatest worth; its row must be computed in this step."""
        entry = heapq.heappop(self._queue)
        self._step_entries.append(entry)
        return entry.node

    def end(self) -> None:
        """Empty the queue: the tree is full, and nothing in it is less probable."""
        self._queue.clear()

    def absorb(self) -> None:
        """List outcomes and grow branches by the rows of a step."""
        entries, self._step_entries = self._step_entries, []
        if self._tree.root not in self._rankings and self._tree.root.distribution is not None:
            self._expand(self._tree.root)
        for entry in entries:
            if entry.outcome is None:
                self._expand(entry.node)
            else:
                self._grow(entry.outcome)

    def take_grown(self) -> list[PreparedProposal]:
        """The proposals that have grown since the last call, most probable outcomes first."""
        outcomes, self._growth = list(self._growth), {}
        outcomes.sort(key=lambda each: -each.weight)
        return [self._read(each) for each in outcomes]

    def branch_below(self, node: Node) -> Branch | None:
        """The branch of the outcome at this node; None: the node is no outcome."""
        outcome = self._outcomes.get(node)
        return None if outcome is None else outcome.branch

    def learn(self, token_ids: Sequence[int]) -> None:
        """Calibrate by the committed tokens' ranks in the rankings in which proposed tokens come first."""
        node = self._tree.root
        for token in token_ids:
            entry = self._rankings.get(node)
            if entry is None:
                return
            best, ranking = entry
            self._calibration.take_rank(ranking.index(token) + 1 if token in ranking else 0, best)
            child = node.children.get(token)
            if child is None:
                return
            node = child

    def _reach(self, node: Node, chance: float) -> None:
        """Add a verified node with its chance of acceptance, and the verified nodes below it."""
        self._chances[node] = chance
        if node.distribution is not None:
            self._expand(node)
            return
        if node is not self._tree.root:
            self._push(node, chance, None)
        for child in self._proposed.get(node, ()):
            self._reach(child, chance * UNKNOWN_CHANCE)

    def _expand(self, node: Node) -> None:
        """Add the outcomes after a verified node whose row is computed."""
        ranking = self._ranking(node)
        best, own_chance = ranking[0].q, self._chances[node]
        self._rankings[node] = best, tuple(token for token, _ in ranking)
        proposed = {child.token: child for child in self._proposed.get(node, ())}
        outcomes = 0
        for rank, (token, _) in enumerate(ranking, start=1):
            if not proposed and outcomes == self._budget.fan_out:
                break
            chance = own_chance * self._calibration.chance(best, rank)
            if token in proposed:
                self._reach_or_correct(proposed.pop(token), chance)
            elif outcomes < self._budget.fan_out:
                outcomes += 1
                self._prepare(node, token, chance)
        for child in proposed.values():
            self._reach_or_correct(child, own_chance * UNRANKED_CHANCE)

    def _ranking(self, node: Node) -> Sequence[NextToken]:
        assert node.distribution is not None, "its row is computed"
        proposed = [child.token for child in self._proposed.get(node, ())]
        return self._draws.ranking(node.distribution, proposed, self.session.ranks)

    def _reach_or_correct(self, node: Node, chance: float) -> None:
        """Correct the chance of a node that was added before its parent's row was computed; it is expanded later."""
        if node in self._chances:
            self._chances[node] = chance
        else:
            self._reach(node, chance)

    def _prepare(self, node: Node, token: int, weight: float) -> None:
        root = node.child(token)
        branch = Branch(root, self.session.shape(self._budget, root), self._draws, self._odds())
        outcome = self._outcomes[root] = _OutcomeBranch(self._indices[node], weight, branch, weight)
        if branch.nodes:
            self._growth[outcome] = None
        self._queue_nodes(outcome)

    def _grow(self, outcome: _OutcomeBranch) -> None:
        if outcome.branch.grow():
            self._growth[outcome] = None
        self._queue_nodes(outcome)

    def _queue_nodes(self, outcome: _OutcomeBranch) -> None:
        """Queue the nodes that would extend a branch, in the branch's own order; other nodes would add nothing."""
        branch = outcome.branch
        for index in branch.nodes_to_compute():
            if index >= outcome.queue_end:
                outcome.floor = min(outcome.floor, outcome.weight * branch.chance(index))
                outcome.queue_end = index + 1
                worth = outcome.floor if index == ROOT else DEEPER * outcome.floor
                if worth >= WORTHLESS:
                    self._push(branch.node(index), worth, outcome)

    def _push(self, node: Node, chance: float, outcome: _OutcomeBranch | None) -> None:
        if self.session.may_compute(node):
            self._orders += 1
            heapq.heappush(self._queue, _Entry(-chance, self._orders, node, outcome))

    def _odds(self) -> Odds:
        if not self._draws.pre_drawn:
            return self._calibration.chance
        (average,) = self._calibration.reach(1)
        return lambda best, rank: average

    def _read(self, outcome: _OutcomeBranch) -> PreparedProposal:
        outcome.proposal_id = outcome.proposal_id or self._next_id()
        proposal = outcome.branch.proposal(outcome.proposal_id, self._drafter)
        return PreparedProposal(outcome.node, outcome.branch.root.token, proposal)


def _children_among(nodes: Sequence[Node]) -> dict[Node, list[Node]]:
    """The verified nodes below each node, each once."""
    children: dict[Node, list[Node]] = {}
    for node in dict.fromkeys(nodes):
        parent = node.parent
        assert parent is not None, "verified nodes hang from the root"
        children.setdefault(parent, []).append(node)
    return children
