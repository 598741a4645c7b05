"""One cell of a scenario on the virtual clock: requests arrive, are limited, placed, served; targets come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.access.keys import KeyLimits
from paceline.access.limits import Meter
from paceline.protocol.errors import Overloaded
from paceline_lab.simulate.requests import RequestRun, RequestTotals
from paceline_lab.simulate.scenario import Autoscaling, Scenario, Traffic
from paceline_lab.simulate.script import Scripts
from paceline_lab.simulate.services import RETRY_MS, SimulatedCell, SimulatedTarget
from paceline_lab.simulate.trace import TracedRequest
from paceline_lab.simulate.traffic import TrafficSource
from paceline_lab.simulate.virtual_time import run_virtually


@dataclass
class CellRecord:
    """What is kept of a cell's run.

    Attributes:
        totals: of all requests that have ended or were refused.
        tokens, rows, steps: within the counted time; rows and steps of targets.
        running: of requests that had not ended when the run did.
        target_busy, draft_busy, coordinator_busy: shares of the counted time, mean over those that ran.
        kv_share: of the targets' KV rows, reserved on average over the run.
        target_ms: how long targets were paid for, all together, within the counted time.
        most_waiting: sessions at once that waited for room at one target.
        lost_sessions: of targets and coordinators that failed: they went on elsewhere.
    """

    totals: list[RequestTotals] = field(default_factory=list)
    tokens: int = 0
    rows: int = 0
    steps: int = 0
    running: list[RequestTotals] = field(default_factory=list)
    target_busy: float = 0.0
    draft_busy: float = 0.0
    coordinator_busy: float = 0.0
    kv_share: float = 0.0
    target_ms: float = 0.0
    most_waiting: int = 0
    lost_sessions: int = 0


@dataclass(frozen=True)
class _CellWork:
    """Milliseconds that services were at work up to a moment, and rows and steps of targets."""

    targets: float
    drafts: float
    coordinators: float
    rows: int
    steps: int


class CellRun:
    """Runs one cell; made on its loop."""

    def __init__(self, scenario: Scenario, number: int) -> None:
        self._scenario = scenario
        seed = scenario.seed * 1_000_003 + number
        self._begin, self._end = 1e3 * scenario.warmup_seconds, 1e3 * scenario.seconds
        self._cell = SimulatedCell(scenario.layout(seed), (scenario.policy,), Scripts(), scenario.disturbance)
        self._sources = [
            TrafficSource(each, group, seed, scenario.seed) for group, each in enumerate(scenario.traffic)
        ]
        self._meters = [self._meter(each) for each in scenario.traffic]
        self._record = CellRecord()
        self._running: dict[asyncio.Task[None], RequestTotals] = {}
        self._requests = 0
        self._defects: list[BaseException] = []
        self._scaler: _Autoscaler | None = None

    async def run(self) -> CellRecord:
        """Run until all requests have ended, or the time for that has.

        Raises:
            Exception: a request failed as none does for want of room.
        """
        await self._cell.start()
        arrivals = [asyncio.create_task(self._arrive(group)) for group in range(len(self._sources))]
        if self._scenario.autoscaling is not None:
            self._scaler = _Autoscaler(self._cell, self._scenario.autoscaling, self._begin, self._end)
        await self._until(self._begin)
        at_begin = self._work()
        await self._until(self._end)
        at_end = self._work()
        await asyncio.gather(*arrivals)
        if self._running:
            await asyncio.wait([*self._running], timeout=self._scenario.drain_seconds)
        if self._defects:
            raise self._defects[0]
        self._finish(at_begin, at_end)
        return self._record

    async def _until(self, ms: float) -> None:
        await asyncio.sleep(max(0.0, ms - self._cell.now_ms) / 1e3)

    async def _arrive(self, group: int) -> None:
        arrivals: Iterator[float] = self._sources[group].arrivals_ms()
        for at_ms in arrivals:
            if at_ms >= self._end:
                break
            await self._until(at_ms)
            self._begin_request(group)

    def _begin_request(self, group: int) -> None:
        """A request comes; of sessions the next one comes when it has ended."""
        self._requests += 1
        request = self._sources[group].request(self._cell.now_ms)
        run = RequestRun(self._cell, self._requests, request, self._tally)
        task = asyncio.create_task(self._serve(run, request, group))
        self._running[task] = run.totals
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        if not task.cancelled() and (defect := task.exception()) is not None:
            self._defects.append(defect)

    async def _serve(self, run: RequestRun, request: TracedRequest, group: int) -> None:
        meter, pause_ms = self._meters[group], 0.0
        home = await self._cell.find_home()
        try:
            if meter is not None:
                meter.begin()
                meter.take_prompt(len(request.prompt))
        except Overloaded as error:
            run.totals.refused = run.totals.limited = True
            pause_ms = error.retry_after_ms or RETRY_MS
        else:
            await run.run(home)
            pause_ms = RETRY_MS if run.totals.refused else 0.0
            if meter is not None:
                meter.take_generated(run.totals.tokens)
                meter.end()
        self._record.totals.append(run.totals)
        await asyncio.sleep(pause_ms / 1e3)  # as clients do
        if self._scenario.traffic[group].sessions and self._cell.now_ms < self._end:
            self._begin_request(group)

    def _meter(self, traffic: Traffic) -> Meter | None:
        tokens, requests = traffic.tokens_per_minute or None, traffic.requests_per_minute or None
        if tokens is None and requests is None:
            return None
        limits = KeyLimits(requests_per_minute=requests, tokens_per_minute=tokens)
        return Meter(limits, lambda: self._cell.now_ms / 1e3)

    def _tally(self, tokens: int) -> None:
        if self._begin <= self._cell.now_ms < self._end:
            self._record.tokens += tokens

    def _work(self) -> _CellWork:
        cell = self._cell
        return _CellWork(
            1e3 * sum(each.executor.busy_s for each in cell.targets),
            1e3 * sum(each.executor.busy_s for each in cell.drafts),
            1e3 * sum(each.processor.busy_s for each in cell.coordinators),
            sum(each.rows for each in cell.targets),
            sum(each.steps for each in cell.targets),
        )

    def _finish(self, begin: _CellWork, end: _CellWork) -> None:
        record, cell, counted_ms = self._record, self._cell, self._end - self._begin
        record.target_ms = self._scaler.paid_ms if self._scaler else counted_ms * len(cell.targets)
        record.target_busy = (end.targets - begin.targets) / max(1e-9, record.target_ms)
        record.draft_busy = (end.drafts - begin.drafts) / (counted_ms * max(1, len(cell.drafts)))
        record.coordinator_busy = (end.coordinators - begin.coordinators) / (counted_ms * len(cell.coordinators))
        record.rows, record.steps = end.rows - begin.rows, end.steps - begin.steps
        record.kv_share = sum(each.kv_ms for each in cell.targets) / (max(1e-9, cell.now_ms) * len(cell.targets))
        record.most_waiting = max(each.most_waiting for each in cell.targets)
        record.lost_sessions = sum(each.lost_sessions for each in cell.targets)
        record.lost_sessions += sum(each.lost_sessions for each in cell.coordinators)
        record.running = [each for each in self._running.values() if not each.has_ended]


class _Autoscaler:
    """Starts and drains targets by their mean load."""

    def __init__(self, cell: SimulatedCell, rule: Autoscaling, begin: float, end: float) -> None:
        self._cell, self._rule, self._begin, self._end = cell, rule, begin, end
        self._starting: asyncio.Task[None] | None = None
        self._draining: list[SimulatedTarget] = []
        self.paid_ms = 0.0
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while self._cell.now_ms < self._end:
            await asyncio.sleep(self._rule.every_seconds)
            self._pay()
            self._look()

    def _pay(self) -> None:
        now, every_ms = self._cell.now_ms, 1e3 * self._rule.every_seconds
        paid = sum(each.is_up for each in self._cell.targets) + (self._starting is not None)
        self.paid_ms += paid * max(0.0, min(now, self._end) - max(now - every_ms, self._begin))

    def _look(self) -> None:
        rule = self._rule
        for each in [each for each in self._draining if not each.load]:
            self._draining.remove(each)
            each.fail(0.0)
        running = [each for each in self._cell.targets if each.is_up and each not in self._draining]
        load = sum(each.load for each in running) / max(1, len(running))
        if load > rule.up_above and self._starting is None:
            off = [each for each in self._cell.targets if not each.is_up]
            self._starting = asyncio.create_task(self._start(off[0])) if off else None
        elif load < rule.down_below and len(running) > rule.least:
            self._draining.append(running[-1])
            for coordinator in self._cell.coordinators:
                coordinator.leave(running[-1])

    async def _start(self, target: SimulatedTarget) -> None:
        await asyncio.sleep(self._rule.start_seconds)
        await self._cell.start_service(target)
        self._starting = None


def run_cells(scenario: Scenario) -> list[CellRecord]:
    """Run the cells that are simulated; they share nothing, so each has a clock of its own."""
    return [run_cell(scenario, number) for number in range(scenario.simulated_cells)]


def run_cell(scenario: Scenario, number: int) -> CellRecord:
    """Run one of a scenario's cells."""

    async def run() -> CellRecord:
        return await CellRun(scenario, number).run()

    return run_virtually(run)
