"""Drafts for all sessions together: commands are applied, then all unfinished work advances in batched steps.

A session waits for a proposal (drafting), or prepares for the outcomes of the
round that is being verified (speculating), or rests. The scheduler lives on the
event loop and owns the sessions' state; drafters run on the executor's thread only.
A commit ends its session's work, at the cost of one step at most.

Work that waits for the features that it reads: those of all committed tokens but the last.

Features follow the verdict by one message. Without them a proposal would be drafted on the drafter's own features and
be worse. So work waits, but never for long, and not at all where the last wait was in vain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from draft_service.drafters.catalogue import Catalogue
from draft_service.drafters.interface import FeatureDrafter
from draft_service.drafters.shadow import ShadowRun
from draft_service.session import CatchUpTask, DraftingSession, DraftTask, SpeculationGrowth, SpeculationTask
from draft_service.step import SessionCall, StepResults, run_steps
from paceline.access.places import Places
from paceline.costs.service_costs import UNKNOWN_LINE, DraftCosts
from paceline.engine.executor import Executor
from paceline.engine.features import decode_features
from paceline.protocol.draft import Commit, DraftBudget, DraftedProposal, DraftOpen, DraftOpened, Shadow, Verifying
from paceline.protocol.errors import require_ids
from paceline.protocol.features import Features
from paceline.protocol.proposal import Outcome, Proposal
from paceline.rpc.sessions import RETRY_AFTER_MS, SessionOwner, SessionScheduler
from paceline.runtime import clock, metrics, telemetry
from paceline.runtime.config import EngineSettings
from paceline.sampling import processors

ROUND_PATIENCE_S = 0.25
"""Longest wait after a commit. Chosen, not tuned: ten times what a full message of features takes at 100 Mbit/s."""
PROMPT_PATIENCE_S = 10.0
"""Longest wait for a session's first features. The target computes the prompt meanwhile, and no round begins."""


@dataclass(frozen=True)
class _Wait:
    begin: Callable[[], None]
    is_draft: bool
    timer: asyncio.TimerHandle


class FeatureWaits:
    """The waiting work of sessions, one piece each. It lives on the event loop."""

    def __init__(self) -> None:
        self._waits: dict[DraftingSession, _Wait] = {}

    @property
    def drafts(self) -> int:
        """The number of proposals that wait."""
        return sum(wait.is_draft for wait in self._waits.values())

    def hold(
        self, session: DraftingSession, begin: Callable[[], None], deadline: float | None, *, draft: bool
    ) -> None:
        """Call `begin` once the session's features are there, its patience is over, or at `deadline` (monotonic)."""
        if not session.lacks_features or session.features_late:
            begin()
            return
        patience = ROUND_PATIENCE_S if session.features_end else PROMPT_PATIENCE_S
        if deadline is not None:
            patience = min(patience, deadline - clock.now())
        timer = asyncio.get_running_loop().call_later(max(patience, 0.0), self._give_up, session)
        self._waits[session] = _Wait(begin, draft, timer)

    def note_arrival(self, session: DraftingSession) -> None:
        """Begin the work of a session whose features have come, if they are all there."""
        if not session.lacks_features:
            self._begin(session)

    def drop(self, session: DraftingSession, *, drafts_only: bool = False) -> None:
        """Drop the work of a session; with `drafts_only`, only a proposal."""
        wait = self._waits.get(session)
        if wait is not None and (wait.is_draft or not drafts_only):
            wait.timer.cancel()
            del self._waits[session]

    def _give_up(self, session: DraftingSession) -> None:
        session.features_late = True
        self._begin(session)

    def _begin(self, session: DraftingSession) -> None:
        wait = self._waits.pop(session, None)
        if wait is not None:
            wait.timer.cancel()
            wait.begin()


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
        """The number of proposals that coordinators wait for."""
        return len(self._drafting) + self._waits.drafts

    @property
    def costs(self) -> DraftCosts:
        """The cost lines, with the sessions and rows of the latest step."""
        return DraftCosts(UNKNOWN_LINE, *self._latest, self.queue_length).with_lines(self._catalogue.lines)

    def open(self, owner: SessionOwner, command: DraftOpen) -> DraftingSession:
        """Begin a session and, if its budget asks for one, its first proposal.

        Raises:
            InvalidInput: an unknown drafter, or a token outside the vocabulary.
            Overloaded: too many sessions are open, or so many of the tenant that others would find no place.
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
        """Handle a commit, the announcement of a round, or features."""
        if isinstance(command, Commit):
            self.commit(session, command)
        elif isinstance(command, Features):
            self.features(session, command)
        else:
            self.verifying(session, command)

    def commit(self, session: DraftingSession, command: Commit) -> None:
        """Append committed tokens and end the session's work.

        The proposal after them is drafted now, unless one was prepared for this
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
        """Prepare for the outcomes of a round that has left for the target, if its budget asks for that.

        Drafting ends, since its proposal would come too late for the round. Missing
        rows are computed in any case. A second announcement of a round changes nothing.

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
        """Hand the target's features of committed tokens to the drafter; those of other tokens are dropped.

        Raises:
            InvalidInput: the drafter reads none, or other layers.
        """
        for part in session.accept_features(features):
            self._calls.append(SessionCall(session, partial(_take_features, session, part)))
            self._wake.set()
        self._waits.note_arrival(session)

    def _follow_grammar(self, session: DraftingSession) -> None:
        grammar, facts, loop = session.facts.sampling.grammar, session.facts, asyncio.get_running_loop()
        if grammar is None or self._catalogue.grammars is None:
            return
        session.grammar = self._catalogue.grammars.open(grammar, facts.end_token_ids, prompt_length=0)

        def wake(_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._wake.set)

        session.grammar.compilation.add_done_callback(wake)

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
            waiting = {session for session in self._busy() if session.awaits_grammar}
            calls = [call for call in self._calls if call.is_needed and call.session not in waiting]
            self._calls = [call for call in self._calls if call.is_needed and call.session in waiting]
            drafts = [task for task in self._drafting.values() if task.session not in waiting]
            speculations = [task for task in self._speculating.values() if task.session not in waiting]
            catch_ups = [task for task in self._catching_up.values() if task.session not in waiting]
            self.steps += await self._executor.run(
                run_steps, calls, drafts, speculations, self._wake.is_set, publish, catch_ups
            )
            self._drop_finished()
            if not all(session.awaits_grammar for session in self._busy()):
                self._wake.set()

    def _busy(self) -> Iterator[DraftingSession]:
        """The sessions of all work that is to be done, some more than once."""
        yield from (call.session for call in self._calls)
        yield from self._drafting
        yield from self._speculating
        yield from self._catching_up

    def _stop(self, session: DraftingSession) -> None:
        """End the session's work; what the running step adds to it is not sent."""
        self._stop_preparing(session)
        self._catching_up.pop(session, None)
        self._waits.drop(session)

    def _stop_preparing(self, session: DraftingSession) -> None:
        """End the session's work on proposals."""
        self._drafting.pop(session, None)
        self._speculating.pop(session, None)
        self._waits.drop(session, drafts_only=True)

    def _drop_finished(self) -> None:
        """Drop tasks that have nothing left to compute and nothing to answer."""
        self._speculating = {session: task for session, task in self._speculating.items() if not task.is_over}
        self._catching_up = {session: task for session, task in self._catching_up.items() if not task.is_over}

    def _begin(
        self, session: DraftingSession, outcome: Outcome | None, budget: DraftBudget, traceparent: str
    ) -> None:
        self._wake.set()
        if not budget.max_tokens:
            if budget.shadow:
                self._waits.hold(session, partial(self._catch_up, session), None, draft=False)
            return
        task = DraftTask(session, outcome, budget, session.next_proposal_id(), clock.now(), traceparent)
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
        for session, reused_tokens in results.openings.items():
            self._send_opened(session, reused_tokens)
        for session, error in results.failures.items():
            self._fail(session, error)
        for task, proposal in results.drafted.items():
            self._send(task, proposal)
        for each in results.growths:
            self._send_prepared(each)
        for session, run in results.shadows:
            self._send_shadow(session, run)
        for took in results.step_times:
            metrics.step_done(*took)

    def _send_opened(self, session: DraftingSession, reused_tokens: int) -> None:
        if not session.closed:
            event = DraftOpened(session.id, session.drafter.manifest.name, reused_tokens)
            session.owner.send(event, urgent=True)

    def _send(self, task: DraftTask, proposal: Proposal) -> None:
        session = task.session
        if self._drafting.get(session) is not task:
            return
        del self._drafting[session]
        timings = task.timings(clock.now())
        session.note_proposal(task.outcome, proposal)
        session.owner.send(DraftedProposal(session.id, task.outcome, proposal, timings), urgent=True)
        telemetry.record_step(task.traceparent, "draft", timings)
        metrics.proposal_sent(len(proposal), on_request=True)

    def _send_prepared(self, growth: SpeculationGrowth) -> None:
        """Send a step's proposals. All are queued before the writer runs, so they travel in one frame."""
        task, session = growth.task, growth.task.session
        if self._speculating.get(session) is not task:
            return
        for each in growth.proposals:
            outcome = Outcome(task.verifying.base_length, each.node, each.next_token)
            session.note_proposal(outcome, each.proposal)
            session.owner.send(DraftedProposal(session.id, outcome, each.proposal, growth.timings), urgent=True)
            metrics.proposal_sent(len(each.proposal), on_request=False)

    def _send_shadow(self, session: DraftingSession, run: ShadowRun) -> None:
        """Send a shadow, which is useful whatever has come since. Urgent, as later proposals would wait for it."""
        if session.takes_shadows and not session.closed:
            ranks, probabilities = zip(*run.standings, strict=True)
            session.owner.send(Shadow(session.id, run.first_position, ranks, probabilities), urgent=True)
            metrics.shadow_sent(ranks)


def _take_features(session: DraftingSession, features: Features) -> None:
    assert isinstance(session.drafter, FeatureDrafter), "its manifest says that it reads features"
    session.drafter.take_features(session.key, features.first_position, decode_features(features))


def _open(session: DraftingSession) -> int:
    return session.drafter.open(session.key, session.facts, session.follower())
