"""Metrics of the sessions and steps of target and draft services."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.protocol.errors import PacelineError
from paceline.runtime.metrics import catalogue as names
from paceline.runtime.metrics.recorder import active


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
