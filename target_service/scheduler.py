"""Continuous batching: each step has the ready rounds of all sessions, and a chunk of the prefixes of opening ones.

The scheduler lives on the event loop; the engine runs on the executor's thread
only. Rounds that arrive during a step are gathered for the next. A failed step
fails its own sessions and no others.

The executor's thread handles a step's results. It starts the next step by itself
if no session has to be admitted, awaited or freed first: the way to the loop and
back costs half a millisecond in which nothing is computed. So sessions are
changed under a lock. Only the loop sends.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import ParamSpec, TypeVar

from paceline.costs.cost_line import CostLine
from paceline.costs.service_costs import TargetCosts
from paceline.engine.executor import Executor
from paceline.engine.interface import Engine, prompt_logit_rows
from paceline.grammars.sessions import Grammars, Masks
from paceline.protocol.errors import PacelineError, PeerUnavailable, UnknownSession
from paceline.protocol.features import Features
from paceline.protocol.records import StepTimings
from paceline.protocol.target import Prefetch, PromptPiece, Round, TargetOpen, TargetOpened, Verdict
from paceline.rpc.sessions import SessionOwner, SessionScheduler
from paceline.runtime import clock, metrics, telemetry
from paceline.runtime.config import TargetConfig
from target_service.admission import Admission, make_room
from target_service.batching import Batcher, alternating
from target_service.checks import check_open
from target_service.features import committed_features
from target_service.meter import TargetMeter
from target_service.progress import EngineProgress
from target_service.prompt_rows import reported_rows
from target_service.session import Session, rows_to_reserve, shared_prefix
from target_service.step import PrefillWork, RoundWork, Step, StepResult, gather_step, run_step
from target_service.timings import opened_event, step_timings
from target_service.verifier import drafted_paths

logger = logging.getLogger(__name__)

COPIES_PER_ROW = 12
"""Shared rows that are copied in the time that it takes to compute one (measured: 14 and more)."""

P = ParamSpec("P")
T = TypeVar("T")
_Event = tuple[Session, Verdict | TargetOpened | PromptPiece | Features | PacelineError]
_Events = list[_Event]
"""Events to send, with the errors of sessions that have failed."""


class TargetScheduler(SessionScheduler[Session]):
    """Sessions in, verdicts out. All public methods run on the event loop and none blocks.

    A session waits for its admission, then for its prefix (`_opening`, in the
    order in which they are served). It is in `_ready` while it has a round to
    verify. Before that, a session with a grammar waits for its worker's masks and
    counts as away, as if the round were still at its coordinator.
    """

    opens = TargetOpen

    def __init__(
        self, engine: Engine, executor: Executor, config: TargetConfig, grammars: Grammars | None, line: CostLine
    ) -> None:
        super().__init__(config.engine.max_sessions_per_link)
        self._engine = engine
        self._executor = executor
        self._settings = config.engine
        self._logit_rows = prompt_logit_rows(engine.info.fingerprint.vocab_size)
        self._progress = EngineProgress(config.step_timeout_ms / 1e3)
        self._opening: dict[int, Session] = {}
        self._ready: dict[int, Session] = {}
        self._verifying: frozenset[int] = frozenset()
        """Keys of the sessions whose rounds are in the running step."""
        self._stopped = False
        self._loop = asyncio.get_running_loop()
        self._lock = threading.RLock()
        """Locked while sessions change, or the collections that they are in."""
        self._batcher = Batcher()
        self._meter = TargetMeter(line)
        self._wake = asyncio.Event()
        self._admission = Admission(
            config.engine.max_num_seqs,
            config.max_queue,
            int(config.max_link_share * engine.info.max_kv_rows),
            engine.info.session_rows,
            grammars,
            make_room=lambda closing, opening: self._engage(make_room, engine, closing, opening),
            on_admitted=self._on_admitted,
            on_failed=self._fail,
            wake=self._wake.set,
        )

    @property
    def queue_length(self) -> int:
        """The number of sessions that wait for grammar, room or prefix, and of rounds that wait for a step."""
        return len(self._admission) + len(self._opening) + len(self._ready)

    @property
    def waiting(self) -> int:
        """The number of sessions that wait for grammar, room or prefix."""
        return len(self._admission) + len(self._opening)

    @property
    def costs(self) -> TargetCosts:
        """The cost lines, with the sessions and rows of the latest step."""
        return self._meter.costs(self.queue_length)

    def moves(self) -> bool:
        """Whether the engine makes progress with the work that waits for a step."""
        return self._progress.moves(waits=bool(self._ready or self._opening))

    def works_for(self, session: Session) -> bool:
        """Whether a session waits for room, its grammar, its prefix, or its round's verdict."""
        key = session.key
        asks = session.pending is not None and not session.has_masks
        return asks or key in self._verifying or key in self._ready or key in self._opening or key in self._admission

    def open(self, owner: SessionOwner, command: TargetOpen) -> Session:
        """Begin a session; it may wait for room.

        Raises:
            InvalidInput, Unsupported: it can't be served.
            Overloaded: the queue is full.
        """
        info = self._engine.info
        check_open(command, info)
        facts = command.spec
        self._admission.check(facts)
        shares = self._settings.prefix_reuse and not info.session_rows
        prefix, keys = shared_prefix(facts, self._settings, shares=shares)
        rows = rows_to_reserve(facts, info)
        session = Session(next(self._keys), command.session_id, owner, facts, rows, clock.now(), prefix, keys)
        session.reported_rows, session.features = reported_rows(command), command.features
        self._admission.enter(session)
        self._add(session)
        return session

    def handle(self, session: Session, command: Round | Prefetch) -> None:
        """Handle a round, or prefetched proposals."""
        if isinstance(command, Round):
            self.submit(session, command)
        else:
            self.prefetch(session, command)

    def submit(self, session: Session, round_: Round) -> None:
        """Queue a round, which waits for the session's prefix. A repeated round gets its verdict again.

        A round with a lease lets the session go on: it is ready for the next step as soon as a verdict has left.

        Raises:
            PrefixMismatch, InvalidInput: the round is refused, the session stays as it is.
            UnknownSession: the session has ended.
        """
        if session.closed:
            raise UnknownSession(f"session {session.id} has ended")
        with self._lock:
            earlier = session.pending
            if session.grammar is None:
                self._batcher.note_return(session.key, clock.now())
            verdict = session.accept(round_, self._engine.info, clock.now())
            if verdict is not None:
                self._send([(session, verdict)])
                self._start_next(session)
            elif session.pending is not earlier:
                self._offer(session)
            if session.key in self._ready:
                self._wake.set()

    def prefetch(self, session: Session, prefetch: Prefetch) -> None:
        """Keep proposals for outcomes of the session's pending round.

        Raises:
            InvalidInput: they are refused, the session stays as it is.
        """
        with self._lock:
            session.prefetch(prefetch, self._engine.info)

    def _release(self, session: Session) -> None:
        with self._lock:
            self._opening.pop(session.key, None)
            self._ready.pop(session.key, None)
            self._batcher.forget(session.key)
            self._admission.leave(session)
        self._wake.set()

    async def run(self) -> None:
        """Run steps until cancelled.

        Raises:
            PeerUnavailable: the engine is lost, and with it every session.
        """
        try:
            await self._run()
        finally:
            self._stopped = True
            self._admission.stop()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            # Prompts are admitted before the wait: the others would have to wait for their chunk.
            rows_to_copy = await self._admission.settle(COPIES_PER_ROW * self._settings.prefill_chunk)
            await self._await_returns()
            await self._admission.settle(rows_to_copy)
            opening = alternating(self._opening.values())
            step = gather_step(self._ready.values(), opening, self._settings, self._logit_rows)
            if step is not None:
                self._wake.set()
                await self._run_step(step)

    async def _await_returns(self) -> None:
        """Wait for sessions that are about to be back, so that the next step has them.

        A step of prefixes alone waits, too: otherwise they would wait for a whole chunk.
        """
        count = len(self._ready) + len(self._opening)
        if not count:
            return
        rows_left = sum(session.prefill_left for session in self._opening.values())
        window = self._batcher.window(count, clock.now(), min(rows_left, self._settings.prefill_chunk))
        while self._batcher.is_away(window.sessions) and (left_s := window.end_s - clock.now()) > 0:
            self._wake.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._wake.wait()
            except TimeoutError:
                return

    def _on_admitted(self, session: Session) -> None:
        metrics.prefix_admitted(session.reused_rows, session.prefill_left)
        if session.prefill_left:
            self._opening[session.key] = session
            return
        session.owner.send(opened_event(session, StepTimings()), urgent=False)
        self._make_ready(session)
        if session.key in self._ready:
            self._wake.set()

    async def _run_step(self, step: Step) -> None:
        """Run a step, and those after it that do not need the loop."""
        loop = asyncio.get_running_loop()

        def publish(events: Sequence[_Event], done: tuple[Step, StepResult] | None = None) -> None:
            loop.call_soon_threadsafe(self._send, events)
            if done is not None and metrics.is_on():
                ran, result = done
                loop.call_soon_threadsafe(metrics.step_done, result.seconds, ran.plan.rows, len(ran.sessions))

        self._take_out(step)
        await self._engage(self._go_on, step, publish)
        self._verifying = frozenset()

    async def _engage(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `fn` on the engine's thread, which has no other work."""
        with self._progress.busy():
            return await self._executor.run(fn, *args, **kwargs)

    def _take_out(self, step: Step) -> None:
        self._verifying = frozenset(work.session.key for work in step.rounds)
        for key in self._verifying:
            self._ready.pop(key, None)

    def _go_on(self, first: Step, publish: Callable[..., None]) -> None:
        """Run a step, then the next ones while they do not need the loop; called on the executor's thread."""
        step: Step | None = first
        while step is not None:
            self._progress.note_work()
            try:
                result = run_step(self._engine, step)
            except PeerUnavailable:
                raise
            except Exception as error:
                logger.exception("step failed: sessions=%s", ",".join(str(session.id) for session in step.sessions))
                publish([(session, session.defect(error)) for session in step.sessions])
                return
            done = step, result
            with self._lock:
                events = self._take_in(step, result)
                step = gather_step(self._ready.values(), (), self._settings, 0) if self._may_go_on() else None
                if step is not None:
                    self._take_out(step)
            publish(events, done)
            if features := committed_features(self._engine, *done):
                publish(features)

    def _may_go_on(self) -> bool:
        """Whether a step can begin without a session to admit, free or wait for first."""
        if self._stopped or not self._ready or self._opening or not self._admission.is_settled:
            return False
        return not self._batcher.window(len(self._ready), clock.now()).sessions

    def _take_in(self, step: Step, result: StepResult) -> _Events:
        """Handle a step's results, start the next rounds of sessions that may go on, and return events to send."""
        self.steps += 1
        self._meter.observe(step, result.seconds * 1e3)
        self._batcher.note_step(result.seconds, sum(work.prefix_rows for work in step.prefixes))
        chunks = zip(step.prefills, result.reports, strict=True)
        events: _Events = [(work.session, each) for work, report in chunks for each in report]
        for prefix in step.prefixes:
            events += self._advance_prefix(prefix, step, result)
        for work, answer in zip(step.rounds, result.answers, strict=True):
            if isinstance(answer, Verdict):
                events += self._answer(step, result, work, answer)
            else:
                events.append((work.session, answer))
        return events

    def _answer(self, step: Step, result: StepResult, work: RoundWork, verdict: Verdict) -> _Events:
        session = work.session
        if session.closed:
            return []
        timings = step_timings(step, result, work.pending.arrived_at, result.started_at, result.forward_ms)
        verdict = session.remember(work.round_, replace(verdict, timings=timings), self._engine.info)
        self._start_next(session)
        if session.key not in self._ready:
            self._batcher.note_answer(session.key, clock.now())
        if work.round_.traceparent:
            telemetry.record_step(work.round_.traceparent, "verify", timings)
        return [(session, verdict)]

    def _start_next(self, session: Session) -> None:
        """Start the session's next round without its coordinator, if it may: then no step waits for its return."""
        if session.start_next(self._engine.info, clock.now()):
            self._offer(session)

    def _offer(self, session: Session) -> None:
        """Make a session with a new round ready, once the masks of its grammar for the round are there."""
        if session.grammar is None:
            self._make_ready(session)
            return
        assert session.pending is not None, "that is the round"
        session.has_masks, round_ = False, session.pending.round_
        masks = session.grammar.ask(session.newly_committed(round_), drafted_paths(round_))

        def deliver(masks: Future[Masks]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._on_masks, session, masks)

        masks.add_done_callback(deliver)

    def _on_masks(self, session: Session, masks: Future[Masks]) -> None:
        error = masks.exception()
        if error is not None:
            self._fail(session, _as_error(session, error))
            return
        with self._lock:
            session.follower.next_masks, session.has_masks = masks.result(), True
            self._batcher.note_return(session.key, clock.now())
            self._make_ready(session)
        self._wake.set()

    def _make_ready(self, session: Session) -> None:
        """Add a session to the ready ones, if its round can be in the next step."""
        if session.can_verify and session.is_admitted and not session.prefill_left and not session.closed:
            self._ready[session.key] = session

    def _advance_prefix(self, work: RoundWork | PrefillWork, step: Step, result: StepResult) -> _Events:
        session = work.session
        session.prefilled_rows += work.prefix_rows
        session.forward_ms += result.forward_ms
        session.first_step = session.first_step or result.started_at
        if session.closed:
            return []
        self._admission.prefixes.release(session, session.prefilled_rows)
        # A session that was served moves behind those that were not.
        del self._opening[session.key]
        if session.prefill_left:
            self._opening[session.key] = session
            return []
        timings = step_timings(step, result, session.arrived_at, session.first_step, session.forward_ms)
        if isinstance(work, PrefillWork):
            self._make_ready(session)
        return [(session, opened_event(session, replace(timings, sample_ms=0.0)))]

    def _send(self, events: Sequence[_Event]) -> None:
        """Send events. A session whose round failed ends here, on the loop, which has its timer."""
        for session, event in events:
            if isinstance(event, PacelineError):
                self._fail(session, event)
            elif not session.closed:
                session.owner.send(event, urgent=isinstance(event, Verdict))


def _as_error(session: Session, error: BaseException) -> PacelineError:
    if isinstance(error, PacelineError):
        return error
    return session.defect(error if isinstance(error, Exception) else RuntimeError(error))
