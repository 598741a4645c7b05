"""The model drafter: a causal language model that shares the target's tokenizer.

Each session keeps one tree of drafted tokens behind its committed ones. A
proposal is a branch of it, whether it is drafted after a commit or ahead of one,
and no row that a commit leaves in the tree is computed again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from draft_service.drafters.branch import Branch
from draft_service.drafters.draws import Distribution, draws_of, ranked_distribution
from draft_service.drafters.interface import DrafterManifest
from draft_service.drafters.shadow import ShadowRun
from draft_service.drafters.speculation import Speculation
from draft_service.drafters.state import SessionState
from draft_service.drafters.tree import TREE_ROWS, DraftTree, Node
from paceline.costs.acceptance import TokenAcceptance
from paceline.costs.cost_line import CostLine
from paceline.costs.cost_meter import MeterPair
from paceline.engine.features import FeatureEngine, FeatureRows
from paceline.engine.interface import Engine, Logits, Prefix, RankedRows, Ranking, RankingEngine, StepItem, StepPlan
from paceline.engine.measuring import measure_line
from paceline.protocol.draft import DraftBudget, Verifying
from paceline.protocol.errors import InvalidInput, require
from paceline.protocol.features import NO_FEATURES
from paceline.protocol.proposal import MAX_PROPOSAL_NODES, MODEL, ROOT, Acceptance, Proposal
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.protocol.session import SessionSpec
from paceline.runtime import clock
from paceline.sampling.processors import Follower, Processors

SHORT_LAG = MAX_PROPOSAL_NODES + 1
"""A lag of one round is caught up at once; prefixes and longer lags share `prefill_chunk`."""
MEASURED_AS = 0
"""The number of the session that is used for measuring; others count from 1."""
MEASURED_PREFIX = (0, 0)
MEASURED_LENGTH = 4
"""That session's prefix, whose first token has features, and two tokens that are drafted after it."""
ROWS_PER_STEP = 64
"""Most rows of a step that is filled with speculation."""


class ModelDraft:
    """A proposal that a session waits for, in the making."""

    def __init__(self, name: str, proposal_id: int, session: SessionState, branch: Branch) -> None:
        self.session = session
        self.branch = branch
        self._name = name
        self._proposal_id = proposal_id

    @property
    def done(self) -> bool:
        """Whether no node can be added."""
        return self.branch.done or (not self.session.tree.lag and self.session.tree.room <= 0)

    def proposal(self) -> Proposal:
        """The proposal as far as it is drafted."""
        return self.branch.proposal(self._proposal_id, self._name)

    def nodes_to_compute(self) -> list[Node]:
        """The nodes to compute next, as far as there is room for their rows."""
        nodes = [self.branch.node(index) for index in self.branch.nodes_to_compute()]
        return nodes[: self.session.tree.room]

    def absorb(self) -> None:
        """Grow the proposal by the rows of a step."""
        self.branch.grow()


@dataclass(frozen=True)
class CatchUp:
    """Rows of committed tokens, in the making; nothing is proposed."""

    session: SessionState

    @property
    def done(self) -> bool:
        """Whether all rows that are of use are computed."""
        return not self.session.tree.lag or not self.session.may_compute(self.session.tree.root)

    def absorb(self) -> None:
        """Nothing depends on the rows of a step."""


@dataclass
class _Work:
    """One session's part of a step; `lag_nodes` are committed tokens whose logits the shadow needs."""

    task: ModelDraft | Speculation | CatchUp
    lag_rows: int
    lag_nodes: list[Node] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    reaches_root: bool = False

    @property
    def rows(self) -> int:
        return self.lag_rows + len(self.nodes)

    @property
    def logit_nodes(self) -> list[Node]:
        """The nodes whose logits are needed, in the order of the step's logit rows."""
        return [*self.lag_nodes, *([self.task.session.tree.root] if self.reaches_root else ()), *self.nodes]

    def item(self) -> StepItem:
        """The session's part of the step."""
        return self.task.session.tree.item(self.lag_rows, self.nodes, len(self.lag_nodes))

    def ranking(self) -> Ranking | None:
        """The ranking with which an engine may replace those logits; None: it may not."""
        session, nodes = self.task.session, self.logit_nodes
        if session.processors is not None or not nodes:
            return None
        return session.draws.ranking_of(tuple(node.position + 1 for node in nodes), session.ranks)

    def absorb(self, answer: Logits | RankedRows) -> None:
        """Store the step's distributions in the nodes, then let branches grow."""
        session, nodes = self.task.session, self.logit_nodes
        distributions: Iterable[Distribution]
        if isinstance(answer, np.ndarray):
            positions = [node.position + 1 for node in nodes]
            logits = session.process(nodes, answer)
            distributions = session.draws.read(logits, positions, session.ranks) if nodes else ()
        else:
            distributions = map(ranked_distribution, answer.ranked_tokens())
        for node, distribution in zip(nodes, distributions, strict=True):
            node.distribution = distribution
        session.compare(self.lag_nodes)
        self.task.absorb()


class ModelDrafter:
    """Drafts with an engine of its own; its methods have the contracts of `Drafter`."""

    def __init__(
        self,
        engine: Engine,
        prefill_chunk: int,
        name: str = MODEL,
        *,
        rows_per_step: int = ROWS_PER_STEP,
        meters: MeterPair | None = None,
    ) -> None:
        self._engine = engine
        self._features = engine if isinstance(engine, FeatureEngine) else None
        self.manifest = DrafterManifest(name, NO_FEATURES if self._features is None else self._features.need)
        self._prefill_chunk = prefill_chunk
        self._rows_per_step = rows_per_step
        self._meters = MeterPair() if meters is None else meters
        self._calibrations = {acceptance: TokenAcceptance() for acceptance in Acceptance}
        self._sessions: dict[int, SessionState] = {}
        self._speculations: dict[int, Speculation] = {}

    @property
    def line(self) -> CostLine:  # noqa: D102
        return self._meters.alone.line

    @property
    def line_beside(self) -> CostLine:  # noqa: D102
        return self._meters.beside.line

    def measure(self) -> None:
        """Time a few steps before there are sessions: a proposal's second step, whose rows are its first nodes.

        Raises:
            Exception: the engine's own; an engine that can't step can't draft.
        """
        prefix, length = MEASURED_PREFIX, MEASURED_LENGTH
        spec = SessionSpec(prefix, len(prefix), SamplingParams(), NoiseKey(0), Acceptance.COUPLED, max_length=length)
        info = self._engine.info
        most = min(MAX_PROPOSAL_NODES // 2, self._rows_per_step, info.fingerprint.vocab_size)
        if min(info.max_length, info.most_rows - MAX_PROPOSAL_NODES) < length:
            return  # it has no room to draft in

        def step(rows: int) -> float:
            self.open(MEASURED_AS, spec)
            try:
                if self._features is not None:
                    self.take_features(MEASURED_AS, 0, np.zeros((1, self._features.feature_width), np.float32))
                draft = self.begin(MEASURED_AS, DraftBudget(max_tokens=2, tree_widths=(rows, 1)), proposal_id=1)
                self.advance([draft])
                started_at = clock.now()
                self.advance([draft])
                return (clock.now() - started_at) * 1e3
            finally:
                self.close(MEASURED_AS)

        self._meters = MeterPair(measure_line(step, most))

    def open(self, session: int, spec: SessionSpec, follower: Follower | None = None) -> int:
        """Reserve the session's rows; the first step computes the prefix, in chunks.

        Raises:
            InvalidInput: the prefix is longer than the drafter's context.
            Overloaded: the KV budget has no room now.
        """
        info, prefix = self._engine.info, spec.token_ids
        if len(prefix) > info.max_length:
            raise InvalidInput.of("prefix length", len(prefix), f"at most {info.max_length}, the drafter's context")
        processors = _processors(spec, follower)
        max_length = min(spec.max_length or info.max_length, info.max_length)
        max_rows = min(max_length + TREE_ROWS, info.most_rows)
        self._engine.open(session, max_rows, Prefix(prompt_rows=max(0, len(prefix) - 1)))
        draws = draws_of(spec.acceptance, spec.sampling, spec.noise, info.fingerprint.vocab_size)
        # Even where the budget is short of rows, the largest proposal fits after the last token that it drafts for.
        longest = min(max_length, max_rows - MAX_PROPOSAL_NODES)
        reads_features, keeps_states = self._features is not None, info.session_rows > 0
        tree = DraftTree(session, prefix, max_rows, reads_features=reads_features, whole_trunk=keeps_states)
        calibration = self._calibrations[spec.acceptance]
        reach = None if self._features is None else self._features.reach
        state = SessionState(tree, draws, calibration, spec.acceptance, longest, reach, processors=processors)
        state.follow(len(prefix))
        self._sessions[session] = state
        return 0

    def commit(self, session: int, token_ids: Sequence[int], *, shadow: bool = False) -> None:  # noqa: D102
        state = self._sessions[session]
        speculation = self._speculations.pop(session, None)
        if speculation is not None and state.draws.pre_drawn:
            speculation.learn(token_ids)
        state.commit(token_ids, shadow=shadow)
        state.proposed = speculation.branch_below(state.tree.root) if speculation is not None else None

    def take_features(self, session: int, first_position: int, rows: FeatureRows) -> None:
        """As `FeatureDrafter`; positions that have features already are skipped, since their rows have read them."""
        tree = self._sessions[session].tree
        if self._features is None:
            raise InvalidInput.of("features of drafter", self.manifest.name, "none: it reads tokens alone")
        new = rows[max(tree.features_end - first_position, 0) :]
        end = first_position + len(rows)
        require(
            end <= len(tree.committed), "features end", end, f"at most {len(tree.committed)}, the committed length"
        )
        if len(new):
            self._features.give(session, end - len(new), new)
            tree.note_features(end)

    def take_shadow(self, session: int) -> Sequence[ShadowRun]:  # noqa: D102
        state = self._sessions.get(session)
        return state.shadow.take() if state is not None else ()

    def catch_up(self, session: int) -> CatchUp:  # noqa: D102
        state = self._sessions[session]
        state.tree.settle()
        return CatchUp(state)

    def begin(self, session: int, budget: DraftBudget, proposal_id: int) -> ModelDraft:  # noqa: D102
        state = self._sessions[session]
        state.tree.settle()
        state.prepare_for(budget)
        shape = state.shape(budget, state.tree.root)
        least_chance = state.least_chance(budget, shape)
        state.proposed = Branch(state.tree.root, shape, state.draws, state.calibration.chance, least_chance)
        return ModelDraft(self.manifest.name, proposal_id, state, state.proposed)

    def speculate(self, session: int, verifying: Verifying, next_id: Callable[[], int]) -> Speculation | None:
        """As `Drafter`; None where rows read features.

        A proposal prepared ahead would be drafted on the engine's own features, and one drafted after the outcome on
        the target's. Their tokens differ, and a round would have to wait for the verdict's features anyway to get the
        better ones.
        """
        state = self._sessions[session]
        if state.tree.reads_features:
            return None
        state.prepare_for(verifying.budget)
        round_nodes = _round_nodes(state, verifying)
        if state.draws.pre_drawn:
            _drop_all_but(state.tree, round_nodes)
        speculation = Speculation(state, round_nodes, verifying.budget, next_id, self.manifest.name)
        self._speculations[session] = speculation
        return speculation

    def advance(  # noqa: D102
        self,
        drafts: Sequence[ModelDraft],
        speculations: Sequence[Speculation] = (),
        catching_up: Sequence[CatchUp] = (),
    ) -> int:
        work = self._gather([*drafts, *speculations, *catching_up])
        if not work:
            return 0
        plan = StepPlan(tuple(each.item() for each in work))
        started_at = clock.now()
        for each, answer in zip(work, self._step(plan, work), strict=True):
            each.absorb(answer)
        if all(each.lag_rows <= each.reaches_root for each in work):  # rows of a prefix are cheaper, having no logits
            self._meters.observe(plan.rows, (clock.now() - started_at) * 1e3, beside=bool(speculations))
        return plan.rows

    def close(self, session: int) -> None:  # noqa: D102
        self._engine.close(session)
        self._sessions.pop(session, None)
        self._speculations.pop(session, None)

    def _step(self, plan: StepPlan, work: Sequence[_Work]) -> Sequence[Logits | RankedRows]:
        if not isinstance(self._engine, RankingEngine):
            return self._engine.step(plan)
        return self._engine.step_and_rank(plan, [each.ranking() for each in work])

    def _gather(self, everyone: Sequence[ModelDraft | Speculation | CatchUp]) -> list[_Work]:
        """The work of a step.

        Long prefixes, and sessions that nobody waits for, share `prefill_chunk` rows of it, to delay others less.
        """
        work: list[_Work] = []
        guesses: list[_Work] = []
        chunk = self._prefill_chunk
        for each in everyone:
            lag = each.session.tree.lag
            rows = lag
            if lag > SHORT_LAG or each.session.tree.in_prefix or isinstance(each, CatchUp):
                rows = min(lag, chunk)
                chunk -= rows
            own_work = _Work(each, rows, each.session.lag_nodes(rows), reaches_root=0 < lag == rows)
            work.append(own_work)
            if isinstance(each, ModelDraft):
                own_work.nodes = [] if lag else each.nodes_to_compute()
            elif isinstance(each, Speculation) and rows == lag:
                guesses.append(own_work)
        _fill(guesses, sum(each.rows for each in work), self._rows_per_step, self.line)
        return [each for each in work if each.rows]


def _processors(spec: SessionSpec, follower: Follower | None) -> Processors | None:
    """The processors of the target's logits before temperature, without a grammar that can't be followed here."""
    sampling = spec.sampling if follower else replace(spec.sampling, grammar=None)
    if sampling.plain:
        return None
    return Processors(sampling, spec.prompt_length, spec.end_token_ids, follower)


def _fill(guesses: Sequence[_Work], rows: int, most: int, line: CostLine) -> None:
    """Add the most probable nodes of all speculations to a step of `rows` rows, while they are worth their time.

    The step's present rows count as certain to be of use.
    """
    order = [(-_next_chance(work), place) for place, work in enumerate(guesses)]
    heapq.heapify(order)
    gain = float(rows)
    while rows < most and order:
        chance, place = -order[0][0], order[0][1]
        if not chance or not is_worth(line, chance, rows, gain):
            return
        work = guesses[place]
        assert isinstance(work.task, Speculation), "drafts come first, by themselves"
        work.nodes.append(work.task.take())
        rows, gain = rows + 1, gain + chance
        heapq.heapreplace(order, (-_next_chance(work), place))


def is_worth(line: CostLine, chance: float, rows: int, gain: float) -> bool:
    """Whether one more row raises the gain per millisecond.

    The step has `rows` rows that gain `gain`; the next row gains `chance`. Its cost is the mean over as many more
    rows as there are: single points of a line are less certain than their trend.
    """
    return chance * line.ms(rows) >= gain * line.per_row(rows, max(1, rows))


def _next_chance(work: _Work) -> float:
    """Chance of the node that a session would compute next; 0 if there is none, or no room for its row."""
    speculation, tree = work.task, work.task.session.tree
    assert isinstance(speculation, Speculation), "drafts come first, by themselves"
    if tree.room <= len(work.nodes):
        speculation.end()
    return speculation.best


def _round_nodes(state: SessionState, verifying: Verifying) -> list[Node]:
    """The nodes of the announced round; those that the tree lacks are added."""
    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    if verifying.proposal is not None:
        tokens, parents = verifying.proposal.token_ids, verifying.proposal.parents
    elif state.proposed is not None and verifying.proposal_id:
        tokens = [node.token for node in state.proposed.nodes[: verifying.node_count]]
        parents = state.proposed.parents[: verifying.node_count]
    nodes: list[Node] = []
    for token, parent in zip(tokens, parents, strict=True):
        nodes.append((state.tree.root if parent == ROOT else nodes[parent]).child(token))
    return nodes


def _drop_all_but(tree: DraftTree, round_nodes: Sequence[Node]) -> None:
    """Free every row that the round does not verify."""
    keep = {tree.root, *round_nodes}
    for node in [*keep]:
        for child in [*node.children.values()]:
            if child not in keep:
                tree.free(child)
