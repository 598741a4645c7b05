"""Metrics of one request, and its line in the log when it ends."""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType

from coordinator.text.sequence import GenerationTask
from paceline.models.tokenizer import Tokenizer
from paceline.protocol.errors import PacelineError
from paceline.protocol.explanation import PlanExplanation
from paceline.protocol.generation import Provenance
from paceline.protocol.records import GenerationStats, RoundRecord
from paceline.runtime import clock, logs, metrics

logger = logging.getLogger(__name__)

MAX_ID_CHARACTERS = 128
_PROCESS = secrets.token_hex(4)
_numbers = itertools.count(1)


class RequestObserver:
    """Watches one request; a context manager.

    Args:
        request_id: the client's name for the request; empty: the request gets a number.
        tokenizer: decodes the prompt for the log; None: the log has no prompts.
    """

    def __init__(self, request_id: str, tokenizer: Tokenizer | None) -> None:
        self.arrived_at = clock.now()
        self._id = request_id[:MAX_ID_CHARACTERS] or f"{_PROCESS}-{next(_numbers)}"
        self._tokenizer = tokenizer
        self._meter = metrics.RequestMeter()
        self._subject = logs.speak_of(request=self._id)
        self._tenant = self._trace = ""
        self._prompt: tuple[int, ...] = ()
        self._stats: tuple[GenerationStats, str] | None = None

    def __enter__(self) -> RequestObserver:
        self._subject.__enter__()
        self._meter.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        self._meter.__exit__(kind, error, stack)
        self._log(error)
        self._subject.__exit__(kind, error, stack)

    @property
    def explains(self) -> bool:
        """Whether `done` uses an explanation."""
        return self._meter.explains

    def begin(self, task: GenerationTask, *, chat: bool) -> None:
        """Note the task of a request that has been read and checked."""
        self._prompt = (*task.prompt, *task.resume_token_ids)
        self._tenant = task.tenant
        self._meter.asks(len(self._prompt), chat=chat)

    @contextmanager
    def in_trace(self, traceparent: str) -> Iterator[None]:
        """Name the trace in all lines that are logged within."""
        self._trace = logs.trace_of(traceparent)
        with logs.speak_of(trace=self._trace):
            yield

    def round_done(self, record: RoundRecord, provenance: Iterable[Provenance]) -> None:
        """Count a round that is over; the next one has left already."""
        self._meter.round_done(record, provenance)

    def done(self, stats: GenerationStats, reason: str, explanation: PlanExplanation | None) -> None:
        """Note that the text has ended, for this finish reason."""
        self._stats = stats, reason
        self._meter.done(stats, reason, explanation)

    def _log(self, error: BaseException | None) -> None:
        """Write one line for the request, and one with its prompt where the operator wants that."""
        if self._tokenizer is not None:
            logger.info("request was: prompt=%s", self._tokenizer.decode(self._prompt))
        if self._stats is None:
            logger.info(
                "request failed: tenant=%s trace=%s prompt_tokens=%d seconds=%.3f reason=%s error=%s",
                self._tenant, self._trace, len(self._prompt), clock.now() - self.arrived_at,
                error.reason if isinstance(error, PacelineError) else type(error).__name__,
                error.for_log if isinstance(error, PacelineError) else "",
            )  # fmt: skip
            return
        stats, reason = self._stats
        logger.info(
            "request done: tenant=%s trace=%s prompt_tokens=%d tokens=%d first_token_ms=%.1f tokens_per_second=%.1f "
            "rounds=%d accepted_per_round=%.2f proposed_per_round=%.2f reason=%s",
            self._tenant, self._trace, len(self._prompt), stats.committed, stats.time_to_first_token_ms,
            stats.tokens_per_second, stats.rounds, stats.num_accepted_draft_tokens / max(1, stats.rounds),
            stats.num_draft_tokens / max(1, stats.rounds), reason,
        )  # fmt: skip
