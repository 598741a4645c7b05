"""The model drafter: a causal language model that shares the target's tokenizer.

Each session keeps one tree of drafted tokens behind its committed ones. A
proposal is a branch of it, whether it is drafted after a commit or ahead of one,
and no row that a commit leaves in the tree is computed again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from draft_service.drafters.branch import Branch
from draft_service.drafters.calibration import Calibration
from draft_service.drafters.draws import Draws, draws_of
from draft_service.drafters.interface import DrafterManifest, DraftingContext
from draft_service.drafters.names import MODEL
from draft_service.drafters.shape import Shape, shape_of
from draft_service.drafters.speculation import Speculation
from draft_service.drafters.tree import DraftTree, Node
from paceline.engine.interface import Engine, Logits, StepPlan
from paceline.errors import InvalidInput
from paceline.types import MAX_PROPOSAL_NODES, ROOT, Acceptance, DraftBudget, Proposal, Verifying

SHORT_LAG = MAX_PROPOSAL_NODES + 1
"""A lag that one round can leave is caught up at once; prefixes and longer ones wait their turn."""
TREE_ROWS = 3 * MAX_PROPOSAL_NODES
"""Rows reserved for a session's tree: a proposal under verification, one being drafted, branches in the rest."""
ROWS_PER_STEP = 16
"""Rows up to which a step is filled with speculation."""
MIN_RANKS = 8
"""Guesses kept of every row, so that budgets can change without computing rows again."""


@dataclass
class _Session:
    """`longest` is the number of tokens up to which it drafts, `proposed` the branch that a round can name."""

    tree: DraftTree
    context: DraftingContext
    draws: Draws
    longest: int
    calibration: Calibration
    ranks: int = MIN_RANKS
    proposed: Branch | None = None
    speculation: Speculation | None = None

    def shape(self, budget: DraftBudget, root: Node) -> Shape:
        """Of a proposal that hangs from `root`."""
        return shape_of(budget, self.context.acceptance, self.longest - root.position - 1)

    def need_ranks(self, ranks: int) -> None:
        """Keep so many guesses of each row; rows of which fewer were kept are computed again."""
        if ranks > self.ranks:
            self.ranks = ranks
            self.tree.forget()


class ModelDrafting:
    """A proposal that a session waits for."""

    def __init__(self, name: str, proposal_id: int, session: _Session, branch: Branch) -> None:
        self.session = session
        self.branch = branch
        self._name = name
        self._proposal_id = proposal_id

    @property
    def done(self) -> bool:
        """Whether no node can be added."""
        return self.branch.done or (not self.session.tree.lag and self.session.tree.room <= 0)

    def proposal(self) -> Proposal:
        """What is drafted so far."""
        return self.branch.proposal(self._proposal_id, self._name)

    def wanted(self) -> list[Node]:
        """Nodes to compute next, as far as there are rows for them."""
        nodes = [self.branch.node(index) for index in self.branch.wanted()]
        return nodes[: self.session.tree.room]

    def absorb(self) -> None:
        """The rows of a step are computed."""
        self.branch.grow()


class ModelSpeculation:
    """The branches that a session prepares while a round is verified."""

    def __init__(self, session: _Session, speculation: Speculation) -> None:
        self.session = session
        self.take_grown = speculation.take_grown
        self.absorb = speculation.absorb
        self.outcomes = speculation

    @property
    def done(self) -> bool:
        """Whether nothing can be added."""
        return self.outcomes.done


@dataclass
class _Work:
    """What one session computes in a step."""

    of: ModelDrafting | ModelSpeculation
    lag_rows: int
    nodes: list[Node] = field(default_factory=list)
    reaches_root: bool = False

    @property
    def rows(self) -> int:
        return self.lag_rows + len(self.nodes)

    def absorb(self, logits: Logits) -> None:
        """Keep what the logits say, then let branches grow."""
        session = self.of.session
        nodes = [session.tree.root, *self.nodes] if self.reaches_root else self.nodes
        for node, row in zip(nodes, logits, strict=True):
            node.law = session.draws.read(row, node.position + 1, session.ranks)
        self.of.absorb()


class ModelDrafter:
    """Drafts with an engine of its own; `Drafter` says what its methods promise."""

    def __init__(
        self,
        engine: Engine,
        prefill_chunk: int,
        name: str = MODEL,
        *,
        reduced_vocabulary: bool = False,
        rows_per_step: int = ROWS_PER_STEP,
    ) -> None:
        self.manifest = DrafterManifest(name, reduced_vocabulary=reduced_vocabulary, trees=True)
        self._engine = engine
        self._prefill_chunk = prefill_chunk
        self._rows_per_step = rows_per_step
        self._calibrations = {acceptance: Calibration() for acceptance in Acceptance}
        self._sessions: dict[int, _Session] = {}

    def open(self, session: int, prefix: Sequence[int], context: DraftingContext) -> int:
        """Reserve the session's rows; the first step computes the prefix, in chunks.

        Raises:
            InvalidInput: the prefix is longer than the drafter's context.
            Overloaded: the KV budget has no room now.
        """
        info = self._engine.info
        if len(prefix) > info.max_length:
            raise InvalidInput.of("prefix length", len(prefix), f"at most {info.max_length}, the drafter's context")
        max_length = min(context.max_length or info.max_length, info.max_length)
        max_rows = min(max_length + TREE_ROWS, info.max_kv_rows)
        self._engine.open(session, max_rows)
        draws = draws_of(context.acceptance, context.sampling, context.noise, info.fingerprint.vocab_size)
        # Where the budget is short of rows, the largest proposal still fits behind the last token drafted for.
        longest = min(max_length, max_rows - MAX_PROPOSAL_NODES)
        tree = DraftTree(session, prefix, max_rows)
        self._sessions[session] = _Session(tree, context, draws, longest, self._calibrations[context.acceptance])
        return 0

    def commit(self, session: int, token_ids: Sequence[int]) -> None:  # noqa: D102
        held = self._sessions[session]
        speculation, held.speculation = held.speculation, None
        if speculation is not None:
            speculation.learn(token_ids)
        held.tree.commit(token_ids)
        held.proposed = speculation.branch_below(held.tree.root) if speculation is not None else None

    def begin(self, session: int, budget: DraftBudget, proposal_id: int) -> ModelDrafting:  # noqa: D102
        held = self._sessions[session]
        shape = held.shape(budget, held.tree.root)
        held.need_ranks(budget.fan_out + shape.widest)
        held.proposed = Branch(held.tree.root, shape, held.draws, held.calibration.chance)
        return ModelDrafting(self.manifest.name, proposal_id, held, held.proposed)

    def speculate(  # noqa: D102
        self, session: int, verifying: Verifying, next_id: Callable[[], int]
    ) -> ModelSpeculation:
        held, budget = self._sessions[session], verifying.budget
        held.need_ranks(budget.fan_out + held.shape(budget, held.tree.root).widest)
        verified = _verified(held, verifying)
        if held.draws.pre_drawn:
            _drop_all_but(held.tree, verified)
        held.speculation = Speculation(
            held.tree,
            verified,
            budget.fan_out,
            held.ranks,
            held.draws,
            held.calibration,
            lambda root: held.shape(budget, root),
            next_id,
            self.manifest.name,
            held.longest,
        )
        return ModelSpeculation(held, held.speculation)

    def advance(  # noqa: D102
        self, draftings: Sequence[ModelDrafting], speculations: Sequence[ModelSpeculation] = ()
    ) -> int:
        work = self._gather(draftings, speculations)
        if not work:
            return 0
        plan = StepPlan(tuple(each.of.session.tree.item(each.lag_rows, each.nodes) for each in work))
        for each, logits in zip(work, self._engine.step(plan), strict=True):
            each.absorb(logits)
        return plan.rows

    def close(self, session: int) -> None:  # noqa: D102
        self._engine.close(session)
        self._sessions.pop(session, None)

    def _gather(self, draftings: Sequence[ModelDrafting], speculations: Sequence[ModelSpeculation]) -> list[_Work]:
        """What a step computes; long prefixes share `prefill_chunk` rows of it, so that they delay nobody longer."""
        work: list[_Work] = []
        guesses: list[_Work] = []
        chunk = self._prefill_chunk
        everyone: list[ModelDrafting | ModelSpeculation] = [*draftings, *speculations]
        for each in everyone:
            lag = each.session.tree.lag
            rows = lag
            if lag > SHORT_LAG or (lag and each.session.tree.in_prefix):
                rows = min(lag, chunk)
                chunk -= rows
            made = _Work(each, rows, reaches_root=0 < lag == rows)
            work.append(made)
            if isinstance(each, ModelDrafting):
                made.nodes = [] if lag else each.wanted()
            elif rows == lag:
                guesses.append(made)
        _fill(guesses, self._rows_per_step - sum(each.rows for each in work))
        return [each for each in work if each.rows]


def _fill(guesses: Sequence[_Work], rows: int) -> None:
    """Give `rows` rows to the most probable nodes of all sessions that speculate."""
    order = [(-_next_chance(work), place) for place, work in enumerate(guesses)]
    heapq.heapify(order)
    while rows > 0 and order:
        chance, place = heapq.heappop(order)
        if chance == 0:
            return
        work = guesses[place]
        assert isinstance(work.of, ModelSpeculation), "drafts come first, by themselves"
        work.nodes.append(work.of.outcomes.take())
        rows -= 1
        heapq.heappush(order, (-_next_chance(work), place))


def _next_chance(work: _Work) -> float:
    """Of the node that a session would compute next; 0 if it has none, or no row for it."""
    assert isinstance(work.of, ModelSpeculation), "drafts come first, by themselves"
    outcomes, tree = work.of.outcomes, work.of.session.tree
    while outcomes.best and tree.room <= len(work.nodes):
        if not outcomes.make_room():
            return 0.0
    return outcomes.best


def _verified(held: _Session, verifying: Verifying) -> list[Node]:
    """The nodes of the round, made where the tree lacks them."""
    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    if verifying.proposal is not None:
        tokens, parents = verifying.proposal.token_ids, verifying.proposal.parents
    elif held.proposed is not None and verifying.proposal_id:
        tokens = [node.token for node in held.proposed.nodes[: verifying.node_count]]
        parents = held.proposed.parents[: verifying.node_count]
    nodes: list[Node] = []
    for token, parent in zip(tokens, parents, strict=True):
        nodes.append((held.tree.root if parent == ROOT else nodes[parent]).child(token))
    return nodes


def _drop_all_but(tree: DraftTree, verified: Sequence[Node]) -> None:
    """Free every row that the round does not verify."""
    kept = {tree.root, *verified}
    for node in [*kept]:
        for child in [*node.children.values()]:
            if child not in kept:
                tree.free(child)
