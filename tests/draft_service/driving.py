"""A model drafter driven by hand: no service, no threads; what it computes is written down by token path."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from draft_service.drafters.interface import PreparedProposal
from draft_service.drafters.model import ModelDraft, ModelDrafter
from draft_service.drafters.speculation import Speculation
from paceline.costs.cost_meter import MeterPair
from paceline.engine.interface import NO_PREFIX, Logits, Prefix, StepPlan
from paceline.engine.table.engine import TableEngine
from paceline.engine.wrapped import WrappedEngine
from paceline.models.table_names import TableSpec
from paceline.protocol.draft import DraftBudget, Verifying
from paceline.protocol.proposal import Acceptance, Proposal
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.protocol.session import SessionSpec

SPEC = TableSpec(vocab=24, seed=3, sharpness=2.0, max_length=400)
PREFIX = (1, 2, 3, 4, 5)

Path = tuple[int, ...]


class PathEngine(WrappedEngine):
    """A table engine that knows the token path of each row it holds, and of each row it was told to compute."""

    def __init__(self, spec: TableSpec = SPEC) -> None:
        super().__init__(TableEngine(spec))
        self._rows: dict[int, list[Path]] = {}
        self.steps: list[list[tuple[int, Path]]] = []

    @property
    def computed(self) -> list[tuple[int, Path]]:
        """(session, path) of every row computed so far."""
        return [row for step in self.steps for row in step]

    def open(self, session: int, max_rows: int, prefix: Prefix = NO_PREFIX) -> int:
        self._rows[session] = []
        return super().open(session, max_rows, prefix)

    def close(self, session: int) -> None:
        super().close(session)
        self._rows.pop(session, None)

    def held(self, session: int) -> list[Path]:
        return self._rows[session]

    def step(self, plan: StepPlan) -> Sequence[Logits]:
        logits = super().step(plan)
        computed: list[tuple[int, Path]] = []
        for item in plan.items:
            rows = self._rows[item.session]
            rows[item.base_length - len(item.kept_rows) :] = [rows[row] for row in item.kept_rows]
            for row, token in enumerate(item.token_ids, start=item.kept_tree):
                parent = item.trunk + item.parent_of(row)
                rows.append((*(rows[parent] if parent >= 0 else ()), token))
                computed.append((item.session, rows[-1]))
        self.steps.append(computed)
        return logits


class FreeRows(MeterPair):
    """Rows cost nothing, whatever the machine that tests run on is doing."""

    def observe(self, rows: int, ms: float, *, beside: bool) -> None:
        return


def path_drafter(spec: TableSpec = SPEC, rows: int = 16) -> ModelDrafter:
    """Of a path engine; a step has so many speculative rows at most."""
    return ModelDrafter(PathEngine(spec), 64, rows_per_step=rows, meters=FreeRows())


@dataclass
class Driver:
    """One session and what the coordinator would know of it."""

    drafter: ModelDrafter = field(default_factory=path_drafter)
    acceptance: Acceptance = Acceptance.COUPLED
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.9))
    seed: int = 11
    session: int = 1
    prefix: Sequence[int] = PREFIX
    committed: list[int] = field(default_factory=list)
    offer: Proposal | None = None
    prepared: dict[tuple[int, int], Proposal] = field(default_factory=dict)
    verified: Proposal | None = None
    speculation: Speculation | None = None

    def __post_init__(self) -> None:
        self.committed = [*self.prefix]
        self._ids = itertools.count(1)
        noise, prefix = NoiseKey(self.seed), tuple(self.prefix)
        self.drafter.open(self.session, SessionSpec(prefix, len(prefix), self.sampling, noise, self.acceptance))

    @property
    def engine(self) -> PathEngine:
        assert isinstance(self.drafter._engine, PathEngine)
        return self.drafter._engine

    def draft(self, budget: DraftBudget) -> Proposal:
        """The proposal drafted just in time, whole."""
        self.offer = self.finish(self.begin(budget)).proposal()
        return self.offer

    def finish(self, drafting: ModelDraft) -> ModelDraft:
        for _ in range(200):
            if drafting.done:
                return drafting
            self.drafter.advance([drafting], [])
        raise AssertionError("it never ends")

    def speculate(self, budget: DraftBudget) -> Proposal:
        """A round leaves with the proposal drafted for it, and all its outcomes are prepared."""
        proposal = self.draft(budget)
        self.verify(budget)
        self.run()
        return proposal

    def begin(self, budget: DraftBudget) -> ModelDraft:
        return self.drafter.begin(self.session, budget, next(self._ids))

    def verify(
        self, budget: DraftBudget, node_count: int | None = None, inline: Proposal | None = None
    ) -> Speculation:
        """A round leaves with the first nodes of the offer, or with a proposal made elsewhere."""
        base = len(self.committed) - 1
        nodes = 0 if self.offer is None or inline else len(self.offer) if node_count is None else node_count
        if inline is not None:
            self.verified = inline
            verifying = Verifying(1, base, proposal=inline, budget=budget)
        elif nodes:
            assert self.offer is not None
            self.verified = self.offer.first(nodes)
            verifying = Verifying(1, base, self.offer.proposal_id, nodes, budget=budget)
        else:
            self.verified = None
            verifying = Verifying(1, base, budget=budget)
        self.prepared = {}
        speculation = self.drafter.speculate(self.session, verifying, lambda: next(self._ids))
        assert speculation is not None, "it reads tokens alone"
        self.speculation = speculation
        return speculation

    def run(self, steps: int = 10_000) -> int:
        """Speculate for some steps, or until nothing is left; returns the steps taken."""
        assert self.speculation is not None
        self._collect(self.speculation.take_grown())
        for done in range(steps):
            if self.speculation.done:
                return done
            self.drafter.advance([], [self.speculation])
            self._collect(self.speculation.take_grown())
        return steps

    def commit(self, outcome: tuple[int, int]) -> Proposal | None:
        """The round ended so; returns what was prepared for it."""
        node, token = outcome
        path = [] if self.verified is None else [self.verified.token_ids[i] for i in self.verified.path(node)]
        self.drafter.commit(self.session, [*path, token])
        self.committed += [*path, token]
        self.offer = self.prepared.get(outcome)
        self.prepared, self.verified, self.speculation = {}, None, None
        return self.offer

    @property
    def longest(self) -> tuple[int, int]:
        """The outcome with the longest of what is prepared."""
        return max(self.prepared, key=lambda outcome: len(self.prepared[outcome]))

    def fresh(self, budget: DraftBudget) -> Proposal:
        """What a session just opened here would propose, on a drafter of its own."""
        return Driver(
            ModelDrafter(TableEngine(SPEC), 64), self.acceptance, self.sampling, self.seed, 1, tuple(self.committed)
        ).draft(budget)

    def _collect(self, grown: list[PreparedProposal]) -> None:
        for each in grown:
            outcome = (each.node, each.next_token)
            before = self.prepared.get(outcome)
            if before is not None:
                assert before.proposal_id == each.proposal.proposal_id
                assert len(before) < len(each.proposal)
                assert_prefix(before, each.proposal)
            self.prepared[outcome] = each.proposal


def assert_prefix(shorter: Proposal, longer: Proposal) -> None:
    """The same nodes, draws and values, as far as the shorter one goes."""
    assert len(shorter) <= len(longer)
    same = replace(longer.first(len(shorter)), proposal_id=shorter.proposal_id)
    assert shorter == same
