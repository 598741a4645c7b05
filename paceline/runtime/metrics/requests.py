"""Metrics of requests and of the coordinator's rounds, and of sessions and steps of target and draft services."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Protocol

from paceline.protocol.errors import Cancelled, InternalError, PacelineError
from paceline.protocol.explanation import GroupReport, ModeReport, PlanExplanation
from paceline.protocol.generation import Provenance
from paceline.protocol.proposal import COPYING, NGRAM
from paceline.protocol.records import GenerationStats, RoundRecord
from paceline.runtime import clock
from paceline.runtime.metrics import catalogue as names
from paceline.runtime.metrics.recorder import MetricRecorder, active

PROVIDER = "paceline"
_states: dict[str, int] = {"waiting": 0, "running": 0}


class RequestMeter:
    """One request; a context manager. Of no effect while metrics are off.

    A request that leaves it without `done` has failed, by the exception that it leaves with.
    """

    def __init__(self) -> None:
        self._recorder = active()
        self._began = clock.now()
        self._state = "waiting"
        self._operation = "text_completion"
        self._ended = False

    def __enter__(self) -> RequestMeter:
        _states[self._state] += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        _states[self._state] -= 1
        if not self._ended:
            self._end(names.reason_of(_typed_error(error)), failed=True)

    @property
    def explains(self) -> bool:
        """Whether `done` makes use of an explanation."""
        return self._recorder.makes(names.ROUNDS_PLANNED)

    def asks(self, prompt_tokens: int, *, chat: bool) -> None:
        """The request is read."""
        self._operation = "chat" if chat else self._operation
        self._recorder.count(names.TOKENS_PROMPT, prompt_tokens)

    def round_done(self, record: RoundRecord, provenance: Iterable[Provenance]) -> None:
        """A round is over and the next one has left."""
        self.first_token()
        _count_round_and_tokens(self._recorder, record, provenance)

    def first_token(self) -> None:
        """The request waits no longer; of no effect when repeated."""
        if self._state == "waiting":
            _states["waiting"] -= 1
            _states["running"] += 1
            self._state = "running"

    def take_rounds(self, records: Sequence[RoundRecord]) -> None:
        """Count all rounds at once, for a caller that has them when the request has ended.

        Where rounds have no metrics, this counts nothing.
        """
        if records:
            self.first_token()
        if _counts_rounds(self._recorder):
            for record in records:
                _count_round(self._recorder, record)

    def done(self, stats: GenerationStats, reason: str, explanation: PlanExplanation | None = None) -> None:
        """The text has ended, for this finish reason."""
        labels = self._operation, PROVIDER, self._recorder.model
        self._recorder.observe(names.FIRST_TOKEN, stats.time_to_first_token_ms / 1e3, *labels)
        if stats.tokens_per_second > 0:
            self._recorder.observe(names.TOKEN_DURATION, 1 / stats.tokens_per_second, *labels)
        if stats.num_spec_steps:
            self._recorder.observe(names.REQUEST_ACCEPTANCE, stats.mean_acceptance_length)
        if explanation is not None and explanation.candidates:
            _count_plans(self._recorder, explanation, sum(record.round_ms for record in stats.records))
        self._end(reason, failed=False)

    def _end(self, outcome: str, *, failed: bool) -> None:
        self._ended = True
        seconds = clock.now() - self._began
        self._recorder.count(names.REQUESTS_ENDED, 1, outcome)
        labels = self._operation, PROVIDER, self._recorder.model
        self._recorder.observe(names.REQUEST_DURATION, seconds, *labels, outcome if failed else "")


def watch_requests() -> None:
    """Have the requests that run shown."""
    for state in _states:
        active().watch(names.REQUESTS_ACTIVE, lambda state=state: _states[state], state)  # type: ignore[misc]


def watch_groups(read: Callable[[], Iterable[tuple[str, GroupReport]]]) -> None:
    """Have shown what requests do together at each target. `read`: by the target's address; on another thread."""
    modes = partial(_modes_of, read)
    active().watch_all(names.GROUP_MODE, lambda: [(key, float(m.name == group.mode)) for key, group, m in modes()])
    active().watch_all(names.GROUP_GAIN, lambda: [(key, m.gain) for key, _, m in modes() if m.gain is not None])
    active().watch_all(names.GROUP_WAIT, lambda: [(key, m.wait_steps) for key, _, m in modes()])


def _modes_of(
    read: Callable[[], Iterable[tuple[str, GroupReport]]],
) -> Iterator[tuple[tuple[str, str], GroupReport, ModeReport]]:
    """Each mode of each group, with its series: target and mode."""
    return (((target, mode.name), group, mode) for target, group in read() for mode in group.modes)


def fell_back(cause: str) -> None:
    """Count a request that goes on without something that it had; causes are those of `catalogue.FALLBACKS`."""
    active().count(names.FALLBACKS, 1, cause)


def reload_failed(file: str) -> None:
    """Count a file that was wrong when it was read again, so that its content from before stays in force."""
    active().count(names.RELOAD_FAILURES, 1, file)


def http_request_done(route: str, status: int, seconds: float) -> None:
    """An HTTP request is answered; `route` is its template, never its path."""
    active().observe(names.HTTP_DURATION, seconds, route, str(status))


def _typed_error(error: BaseException | None) -> PacelineError:
    if isinstance(error, PacelineError):
        return error
    return Cancelled("") if isinstance(error, asyncio.CancelledError) else InternalError("")


def round_done(record: RoundRecord, provenance: Iterable[Provenance]) -> None:
    """Count a round of a request that belongs to another server, which counts its requests itself."""
    _count_round_and_tokens(active(), record, provenance)


def _count_round_and_tokens(recorder: MetricRecorder, record: RoundRecord, provenance: Iterable[Provenance]) -> None:
    if _counts_rounds(recorder):
        _count_round(recorder, record)
    for each in provenance:
        recorder.count(names.TOKENS_COMMITTED, 1, each.value)


def _counts_rounds(recorder: MetricRecorder) -> bool:
    return recorder.makes(names.ROUND_DURATION)  # every round has one


def _count_round(recorder: MetricRecorder, record: RoundRecord) -> None:
    proposer = NGRAM if record.drafter in COPYING else "model" if record.drafter else "none"
    recorder.observe(names.ROUND_DURATION, record.round_ms / 1e3, proposer)
    target = record.target
    if record.reasoning:
        _count_reasoning(recorder, record, proposer)
    for part, ms in (
        ("draft_wait", record.draft_wait_ms),
        ("wire", record.wire_ms),
        ("queue", target.queue_ms),
        ("verify", target.service_ms - target.queue_ms),
        ("accept", record.accept_ms),
    ):
        recorder.observe(names.ROUND_PART, ms / 1e3, part)
    if record.self_started:
        recorder.count(names.ROUNDS_SELF_STARTED, 1)
    if record.cache_hit or record.cache_miss:
        recorder.count(names.CACHE_LOOKUPS, 1, "hit" if record.cache_hit else "miss")
    if record.proposed:
        recorder.count(names.ROUNDS_PROPOSED, 1, proposer)
        recorder.count(names.TOKENS_PROPOSED, record.proposed, proposer)
        for position in range(record.accepted):
            recorder.count(names.TOKENS_ACCEPTED, 1, str(position))


def _count_reasoning(recorder: MetricRecorder, record: RoundRecord, proposer: str) -> None:
    recorder.observe(names.REASONING_ROUND_DURATION, record.round_ms / 1e3, proposer)
    recorder.count(names.REASONING_TOKENS, record.proposed, "proposed")
    recorder.count(names.REASONING_TOKENS, record.accepted, "accepted")


def _count_plans(recorder: MetricRecorder, explanation: PlanExplanation, request_ms: float) -> None:
    for each in explanation.candidates:
        if each.rounds:
            recorder.count(names.ROUNDS_PLANNED, each.rounds, each.name, names.range_of(each.draft_tokens))
    if len(explanation.target_alone_ms) > 1:
        one, two = explanation.target_alone_ms[:2]
        recorder.watch(names.ROW_PRICE, lambda: max(0.0, two - one) / 1e3)
    if request_ms > 0:
        recorder.observe(names.REQUEST_OVERTIME, explanation.account_ms / request_ms)
    if explanation.account_ms > explanation.account_bound_ms:
        recorder.count(names.REQUESTS_OVER_BOUND, 1)


class WatchedScheduler(Protocol):
    """The numbers of a service's scheduler that are read when metrics are collected, on another thread."""

    @property
    def sessions(self) -> int:
        """The number of open sessions."""

    @property
    def waiting(self) -> int:
        """The number of open sessions that no step serves yet."""

    @property
    def queue_length(self) -> int:
        """The length of the queue for steps."""


def watch_service(scheduler: WatchedScheduler, kv_rows: Callable[[], int], max_kv_rows: int) -> None:
    """Have a service's sessions, queue and KV rows shown."""
    recorder = active()
    role = recorder.service
    recorder.watch(names.SESSIONS, lambda: scheduler.waiting, role, "waiting")
    recorder.watch(names.SESSIONS, lambda: max(0, scheduler.sessions - scheduler.waiting), role, "running")
    recorder.watch(names.QUEUE, lambda: scheduler.queue_length, role)
    recorder.watch(names.KV_ROWS, kv_rows, role)
    recorder.watch(names.KV_USAGE, lambda: kv_rows() / max(1, max_kv_rows), role)


def watch_grammars(workers: Callable[[], int]) -> None:
    """Have a service's grammar workers shown."""
    active().watch(names.GRAMMAR_WORKERS, workers, active().service)


def step_done(seconds: float, rows: int, sessions: int) -> None:
    """Count a step that is over."""
    recorder = active()
    recorder.observe(names.STEP_DURATION, seconds, recorder.service)
    recorder.observe(names.STEP_ROWS, rows, recorder.service)
    recorder.observe(names.STEP_SESSIONS, sessions, recorder.service)


def session_refused(error: PacelineError) -> None:
    """Count a session that was not opened."""
    active().count(names.SESSIONS_REFUSED, 1, active().service, names.reason_of(error))


def session_failed(error: PacelineError) -> None:
    """Count a session that the service has ended."""
    active().count(names.SESSIONS_FAILED, 1, active().service, names.reason_of(error))


def prefix_admitted(reused_tokens: int, computed_tokens: int) -> None:
    """Count the prefix of a target's session that has its rows: its tokens that were there, and those computed."""
    active().count(names.PREFIX_TOKENS, reused_tokens, "reused")
    active().count(names.PREFIX_TOKENS, computed_tokens, "computed")


def proposal_sent(nodes: int, *, on_request: bool) -> None:
    """Count a draft that has left for the coordinator; `on_request`: a round asked for it."""
    kind = "asked" if on_request else "prepared"
    active().count(names.DRAFT_PROPOSALS, 1, kind)
    active().count(names.DRAFT_TOKENS, nodes, kind)


def shadow_sent(ranks: Sequence[int]) -> None:
    """Count the ranks that committed tokens had in the draft's order; 0: not in it."""
    for rank in ranks:
        active().count(names.SHADOW, 1, _range_of_rank(rank))


def features_came(size: int) -> None:
    """Count `size` bytes of hidden states that a target has sent."""
    active().count(names.FEATURE_BYTES, size)


def _range_of_rank(rank: int) -> str:
    if rank <= 0:
        return "none"
    place = next((place for place, most in enumerate((1, 2, 4, 8)) if rank <= most), 4)
    return names.SHADOW_RANKS[place]
