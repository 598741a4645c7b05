"""A session of the target that starts prefetched rounds, driven as the scheduler drives it, and mutants of it.

Every round carries a proposal, a tree now and then, and prefetches proposals for all outcomes that it can have, some
of them wrong. The exact one draws the text of target-only rounds, to the token. A mutant overrides one seam.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from paceline.engine.interface import EngineInfo
from paceline.protocol.proposal import ROOT, Acceptance, Outcome, Proposal
from paceline.protocol.target import Prefetch, Round, Verdict
from paceline.sampling import acceptance
from target_service.session import Session
from target_service.verifier import verify
from tests.mutants.runs import END, INFO, MODEL, PROMPT, VOCAB, DrivenSession

PARENTS = ((-1, 0, 1), (-1, -1, 0, 1), (-1, 0, -1, 2))
"""A chain, and trees whose accepted path does not stand in place."""


class PrefetchedRounds(DrivenSession):
    """The exact algorithm."""

    def __init__(self, seed: int, *, prefetching: bool = True, lease: int = 0, kind: type[Session] = Session) -> None:
        super().__init__(Acceptance.COUPLED, seed, kind)
        self.rng = np.random.default_rng(seed)
        self.prefetching, self.lease = prefetching, lease
        self.self_started = 0

    def text(self) -> tuple[int, ...]:
        """Send each round that the target has not started, until the text ends; what is behind the end is cut off."""
        node = ROOT
        while not self.ended():
            if self.session.pending is None:
                sent = Round(1, len(self.ids) - 1, node, (self.ids[-1],), self.proposal())
                self.session.accept(replace(sent, lease=self.lease, drafting=self.lease > 0), INFO, 0.0)
            assert self.session.pending is not None, "it was sent, or it was started"
            round_ = self.session.pending.round_
            if self.prefetching:
                self.session.prefetch(self.prefetched(round_), INFO)
            verdict = self.session.remember(round_, self.answer(round_), INFO)
            decision = acceptance.decide(Acceptance.COUPLED, round_, verdict, self.facts.noise)
            node = decision.node
            self.ids += decision.committed
            self.self_started += self.session.start_next(INFO, 0.0)
        return tuple(self.ids[len(PROMPT) : self.end()])

    def ended(self) -> bool:
        """Whether the text is whole."""
        return END in self.ids[len(PROMPT) :] or len(self.ids) >= self.facts.max_length

    def end(self) -> int:
        """Where the text ends."""
        length = min(len(self.ids), self.facts.max_length)
        return self.ids.index(END) + 1 if END in self.ids[:length] else length

    def proposal(self) -> Proposal:
        """Of tokens that are right about one time in three."""
        parents = PARENTS[self.rng.integers(len(PARENTS))]
        return Proposal(1, tuple(map(int, self.rng.integers(0, 3, len(parents)))), (1.0,) * len(parents), parents)

    def prefetched(self, round_: Round) -> Prefetch:
        """For half of the outcomes."""
        nodes = range(ROOT, len(round_.proposal) if round_.proposal else 0)
        outcomes = [Outcome(round_.base_length, node, token) for node in nodes for token in range(VOCAB)]
        chosen = [each for each in outcomes if self.rng.random() < 0.5]
        return Prefetch(1, round_.base_length, tuple((outcome, self.proposal()) for outcome in chosen))

    def answer(self, round_: Round) -> Verdict:
        """A step: each row's logits follow the rows that the session kept, which are all that the target has."""
        assert self.processors is not None
        self.processors.advance(self.session.newly_committed(round_))
        proposal, trunk = round_.proposal, self.kept(round_)
        paths = [proposal.path(node) for node in range(ROOT, len(proposal))] if proposal else [()]
        tokens = proposal.token_ids if proposal else ()
        rows = [MODEL.logits([*trunk, *(tokens[node] for node in path)]) for path in paths]
        return verify(np.stack(rows), self.facts, round_, self.processors)

    def kept(self, round_: Round) -> list[int]:
        """The tokens that the round hangs from, by the session's own word."""
        if self.session.last is None:
            self.rows = [*PROMPT]
        else:
            self.rows += self.session.newly_committed(round_)
        return self.rows


class SeamedSession(Session):
    """Starts what it finds by what `found_by` looks at."""

    def found_by(self, outcome: Outcome) -> tuple[int, ...]:
        return outcome.base_length, outcome.node, outcome.next_token

    def _named_next(self, round_: Round, verdict: Verdict, info: EngineInfo) -> Round | None:
        decision = acceptance.decide(self.facts.acceptance, round_, verdict, self.facts.noise)
        wanted = self.found_by(decision.outcome(round_.base_length))
        alike = [each for outcome, each in self.prefetched_rounds.items() if self.found_by(outcome) == wanted]
        return alike[0] if alike else None


class WhateverTheNode(SeamedSession):
    """Only the next token is looked at."""

    def found_by(self, outcome: Outcome) -> tuple[int, ...]:
        return (outcome.next_token,)


class WhateverTheNextToken(SeamedSession):
    """Only the node is looked at."""

    def found_by(self, outcome: Outcome) -> tuple[int, ...]:
        return (outcome.node,)


class KeepsTheFirstNodes(SeamedSession):
    """The round behind keeps as many rows as were accepted, and not those of the accepted path."""

    def _named_next(self, round_: Round, verdict: Verdict, info: EngineInfo) -> Round | None:
        prefetched = super()._named_next(round_, verdict, info)
        if prefetched is None or prefetched.accepted_node == ROOT or round_.proposal is None:
            return prefetched
        return replace(prefetched, accepted_node=len(round_.proposal.path(prefetched.accepted_node)) - 1)


class KeyedAsIfAllWereAccepted(SeamedSession):
    """The round behind begins where the whole proposal would end."""

    def _named_next(self, round_: Round, verdict: Verdict, info: EngineInfo) -> Round | None:
        prefetched = super()._named_next(round_, verdict, info)
        if prefetched is None or round_.proposal is None:
            return prefetched
        return replace(prefetched, base_length=round_.first_position + max(round_.proposal.depths))


class GoesOnFromTheRoot(Session):
    """Where nothing was prefetched the round behind keeps no row of the proposal's, under a mixed lease."""

    def _named_next(self, round_: Round, verdict: Verdict, info: EngineInfo) -> Round | None:
        named = super()._named_next(round_, verdict, info)
        return named if named is None or named.proposal else replace(named, accepted_node=ROOT)


class GoesOnBehindTheWholeProposal(Session):
    """Where nothing was prefetched the round behind is keyed as if all had been accepted, under a mixed lease."""

    def _named_next(self, round_: Round, verdict: Verdict, info: EngineInfo) -> Round | None:
        named = super()._named_next(round_, verdict, info)
        if named is None or named.proposal or round_.proposal is None:
            return named
        return replace(named, base_length=round_.first_position + max(round_.proposal.depths))
