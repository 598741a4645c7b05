"""Drafts for all sessions together: what arrived is applied, then all unfinished work advances in batched steps.

A session waits for a proposal (drafting), or prepares for the outcomes of the
round that is being verified (speculating), or rests. The scheduler lives on the
event loop and owns the sessions' state; drafters are touched on the executor's
thread only. A commit ends what its session was doing, at the cost of one step at
most.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

from draft_service.drafters.catalogue import Catalogue
from draft_service.drafters.interface import FeatureDrafter
from draft_service.drafters.shadow import ShadowRun
from draft_service.feature_waits import FeatureWaits
from draft_service.session import CatchUpTask, DraftingSession, DraftTask, Grown, SpeculationTask
from draft_service.step import SessionCall, StepResults, run_steps
from paceline.access.places import Places
from paceline.costs.service_costs import UNKNOWN_LINE, DraftCosts
from paceline.engine.executor import Executor
from paceline.engine.feature_rows import decode_features
from paceline.protocol.draft import Commit, DraftBudget, DraftedProposal, DraftOpen, DraftOpened, Shadow, Verifying
from paceline.protocol.errors import require_ids
from paceline.protocol.features import Features
from paceline.protocol.proposal import Outcome, Proposal
from paceline.rpc.sessions import RETRY_AFTER_MS, SessionOwner, SessionScheduler
from paceline.runtime import metrics, telemetry
from paceline.runtime.config import EngineSettings
from paceline.sampling import processors


class DraftScheduler(SessionScheduler[DraftingSession]):
    """Sessions in, proposals out. All methods run on the event loop and none blocks."""

    opens = DraftOpen

    def __init__(self, catalogue: Catalogue, executor: Executor, settings: EngineSettings) -> None:
        super().__init__(settings.max_sessions_per_link)
        self._catalogue = catalogue
        self._executor = executor
        self._places = Places("engine.max_num_seqs", settings.max_num_seqs, RETRY_AFTER_MS)
        self._calls: list[SessionCall] = []
        self._drafting: dict[DraftingSession, DraftTask] = {}
        self._speculating: dict[DraftingSession, SpeculationTask] = {}
        self._catching_up: dict[DraftingSession, CatchUpTask] = {}
        self._waits = FeatureWaits()
        self._wake = asyncio.Event()
        self._latest = (0, 0)
        """Sessions and rows of the latest step."""

    @property
    def queue_length(self) -> int:
        """Proposals that coordinators wait for."""
        return len(self._drafting) + self._waits.drafts

    @property
    def costs(self) -> DraftCosts:
        """What steps take, and who was in the latest."""
        return DraftCosts(UNKNOWN_LINE, *self._latest, self.queue_length).with_lines(self._catalogue.lines)

    def open(self, owner: SessionOwner, command: DraftOpen) -> DraftingSession:
        """Begin a session and, if its budget asks for one, its first proposal.

        Raises:
            InvalidInput: an unknown drafter, or a token outside the vocabulary.
            Overloaded: too many sessions are open, or as many of the tenant as leave others room.
        """
        facts = command.spec
        drafter = self._catalogue.pick(command.drafter)
        vocab_size = self._catalogue.fingerprint.vocab_size
        require_ids("token_ids", facts.token_ids, vocab_size)
        processors.check_ids(facts.sampling, facts.end_token_ids, vocab_size)
        self._places.check(facts.tenant)
        key, length = next(self._keys), len(facts.token_ids)
        session = DraftingSession(
            key, command.session_id, owner, facts, drafter, vocab_size, length, command.takes_shadows
        )
        self._follow_grammar(session)
        self._add(session)
        self._places.take(facts.tenant)
        self._calls.append(SessionCall(session, partial(_open, session), opens=True))
        self._begin(session, None, command.budget, facts.traceparent)
        return session

    def handle(self, session: DraftingSession, command: Commit | Verifying | Features) -> None:
        """Take a commit, the announcement of a round or features in."""
        if isinstance(command, Commit):
            self.commit(session, command)
        elif isinstance(command, Features):
            self.features(session, command)
        else:
            self.verifying(session, command)

    def commit(self, session: DraftingSession, command: Commit) -> None:
        """Take in new committed tokens and end what the session was doing.

        The proposal behind them is drafted now, unless one was prepared for this
        outcome: then the coordinator has it, or will have it before it can ask.

        Raises:
            PrefixMismatch, InvalidInput: the commit is refused, the session stays as it is.
        """
        session.accept(command)
        shadow = command.budget.shadow
        commit = partial(session.drafter.commit, session.key, command.token_ids, shadow=shadow)
        self._calls.append(SessionCall(session, commit))
        self._stop(session)
        self._wake.set()
        if session.offer is None:
            self._begin(session, command.outcome, command.budget, command.traceparent)

    def verifying(self, session: DraftingSession, command: Verifying) -> None:
        """A round has left for the target: prepare for its outcomes, if its budget asks for that.

        Drafting ends: its proposal would come too late for the round. Rows that
        were to be caught up are computed in any case. Announcing a round again changes nothing.

        Raises:
            PrefixMismatch, InvalidInput: it doesn't follow what the session holds.
        """
        if command == session.verifying:
            return
        session.note(command)
        self._stop_preparing(session)
        if command.budget.fan_out and command.budget.max_tokens:
            self._stop(session)  # a speculation computes the missing rows itself
            task = self._speculating[session] = SpeculationTask(session, command)
            self._calls.append(SessionCall(session, task.begin))
            self._wake.set()

    def features(self, session: DraftingSession, features: Features) -> None:
        """Hand the target's features of committed tokens to the drafter; of other tokens they are dropped.

        Raises:
            InvalidInput: the drafter reads none, or other layers.
        """
        for known in session.known(features):
            self._calls.append(SessionCall(session, partial(_take_features, session, known)))
            self._wake.set()
        self._waits.arrived(session)

    def _follow_grammar(self, session: DraftingSession) -> None:
        grammar, facts, loop = session.facts.sampling.grammar, session.facts, asyncio.get_running_loop()
        if grammar is None or self._catalogue.grammars is None:
            return
        session.grammar = self._catalogue.grammars.open(grammar, facts.end_token_ids, prompt_length=0)

        def compiled(_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._wake.set)

        session.grammar.compilation.add_done_callback(compiled)

    def _release(self, session: DraftingSession) -> None:
        self._places.give_back(session.facts.tenant)
        self._stop(session)
        if session.grammar is not None:
            session.grammar.close()
        self._calls.append(SessionCall(session, partial(session.drafter.close, session.key), closes=True))
        self._wake.set()

    async def run(self) -> None:
        """Run steps until cancelled."""
        try:
            await self._run()
        finally:
            if self._catalogue.grammars is not None:
                self._catalogue.grammars.close()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()

        def publish(results: StepResults) -> None:
            loop.call_soon_threadsafe(self._deliver, results)

        while True:
            await self._wake.wait()
            self._wake.clear()
            held = {session for session in self._busy() if session.held}
            calls = [call for call in self._calls if call.wanted and call.session not in held]
            self._calls = [call for call in self._calls if call.wanted and call.session in held]
            drafts = [task for task in self._drafting.values() if task.session not in held]
            speculations = [task for task in self._speculating.values() if task.session not in held]
            catch_ups = [task for task in self._catching_up.values() if task.session not in held]
            self.steps += await self._executor.run(
                run_steps, calls, drafts, speculations, self._wake.is_set, publish, catch_ups
            )
            self._drop_finished()
            if not all(session.held for session in self._busy()):
                self._wake.set()

    def _busy(self) -> Iterator[DraftingSession]:
        """The session of everything that is to be done."""
        yield from (call.session for call in self._calls)
        yield from self._drafting
        yield from self._speculating
        yield from self._catching_up

    def _stop(self, session: DraftingSession) -> None:
        """End what the session was doing; what the running step adds to it is not sent."""
        self._stop_preparing(session)
        self._catching_up.pop(session, None)
        self._waits.drop(session)

    def _stop_preparing(self, session: DraftingSession) -> None:
        """End what the session did for proposals."""
        self._drafting.pop(session, None)
        self._speculating.pop(session, None)
        self._waits.drop(session, drafts_only=True)

    def _drop_finished(self) -> None:
        """Drop what has nothing left to compute and nothing to answer."""
        self._speculating = {session: task for session, task in self._speculating.items() if not task.over}
        self._catching_up = {session: task for session, task in self._catching_up.items() if not task.over}

    def _begin(
        self, session: DraftingSession, outcome: Outcome | None, budget: DraftBudget, traceparent: str
    ) -> None:
        self._wake.set()
        if not budget.max_tokens:
            if budget.shadow:
                self._waits.hold(session, partial(self._catch_up, session), None, draft=False)
            return
        task = DraftTask(session, outcome, budget, session.next_proposal_id(), time.monotonic(), traceparent)
        self._waits.hold(session, partial(self._draft, task), task.deadline, draft=True)

    def _draft(self, task: DraftTask) -> None:
        self._drafting[task.session] = task
        self._calls.append(SessionCall(task.session, task.begin))
        self._wake.set()

    def _catch_up(self, session: DraftingSession) -> None:
        catch_up = self._catching_up[session] = CatchUpTask(session)
        self._calls.append(SessionCall(session, catch_up.begin))
        self._wake.set()

    def _deliver(self, results: StepResults) -> None:
        if results.rows:
            self._latest = results.sessions, results.rows
        for session, reused in results.opened.items():
            self._send_opened(session, reused)
        for session, error in results.failures.items():
            self._fail(session, error)
        for task, proposal in results.drafted.items():
            self._send(task, proposal)
        for each in results.grown:
            self._send_prepared(each)
        for session, run in results.shadows:
            self._send_shadow(session, run)
        for took in results.took:
            metrics.stepped(*took)

    def _send_opened(self, session: DraftingSession, reused: int) -> None:
        if not session.closed:
            opened = DraftOpened(session.id, session.drafter.manifest.name, reused)
            session.owner.send(opened, urgent=True)

    def _send(self, task: DraftTask, proposal: Proposal) -> None:
        session = task.session
        if self._drafting.get(session) is not task:
            return
        del self._drafting[session]
        timings = task.timings(time.monotonic())
        session.sent(task.outcome, proposal)
        session.owner.send(DraftedProposal(session.id, task.outcome, proposal, timings), urgent=True)
        telemetry.record_step(task.traceparent, "draft", timings)
        metrics.proposal_sent(len(proposal), asked=True)

    def _send_prepared(self, grown: Grown) -> None:
        """All of a step's proposals are queued before the writer runs, so they travel in one frame."""
        task, session = grown.task, grown.task.session
        if self._speculating.get(session) is not task:
            return
        for each in grown.prepared:
            outcome = Outcome(task.verifying.base_length, each.node, each.next_token)
            session.sent(outcome, each.proposal)
            session.owner.send(DraftedProposal(session.id, outcome, each.proposal, grown.timings), urgent=True)
            metrics.proposal_sent(len(each.proposal), asked=False)

    def _send_shadow(self, session: DraftingSession, run: ShadowRun) -> None:
        """Of use whatever has come since; urgent, as a session's later proposals would wait for it."""
        if session.takes_shadows and not session.closed:
            ranks, probabilities = zip(*run.standings, strict=True)
            session.owner.send(Shadow(session.id, run.first_position, ranks, probabilities), urgent=True)
            metrics.shadow_sent(ranks)


def _take_features(session: DraftingSession, features: Features) -> None:
    assert isinstance(session.drafter, FeatureDrafter), "its manifest says that it reads features"
    session.drafter.take_features(session.key, features.first_position, decode_features(features))


def _open(session: DraftingSession) -> int:
    return session.drafter.open(session.key, session.facts, session.follower())
