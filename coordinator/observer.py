"""What a request leaves behind for whoever operates the coordinator: metrics, and a line in the log when it ends."""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType

from coordinator.text.sequence import GenerationTask
from paceline.models.tokenizer import Tokenizer
from paceline.protocol.errors import PacelineError
from paceline.protocol.explanation import PlanExplanation
from paceline.protocol.generation import Provenance
from paceline.protocol.records import GenerationStats, RoundRecord
from paceline.runtime import logs, metrics

logger = logging.getLogger(__name__)

MAX_ID_CHARACTERS = 128
_PROCESS = secrets.token_hex(4)
_numbers = itertools.count(1)


class RequestObserver:
    """Watches one request, a context manager.

    Args:
        given_id: what the client calls the request; empty: it is numbered.
        tokenizer: with which the prompt is written into the log; None: it is not.
    """

    def __init__(self, given_id: str, tokenizer: Tokenizer | None) -> None:
        self.arrived = time.perf_counter()
        self._id = given_id[:MAX_ID_CHARACTERS] or f"{_PROCESS}-{next(_numbers)}"
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
        """Whether `done` makes use of an explanation."""
        return self._meter.explains

    def asks(self, task: GenerationTask, *, chat: bool) -> None:
        """The request is read and checked."""
        self._prompt = (*task.prompt, *task.resumed)
        self._tenant = task.tenant
        self._meter.asks(len(self._prompt), chat=chat)

    @contextmanager
    def traced(self, traceparent: str) -> Iterator[None]:
        """What is logged within belongs to a trace."""
        self._trace = logs.trace_of(traceparent)
        with logs.speak_of(trace=self._trace):
            yield

    def round_done(self, record: RoundRecord, provenance: Iterable[Provenance]) -> None:
        """A round is over and the next one has left."""
        self._meter.round_done(record, provenance)

    def done(self, stats: GenerationStats, reason: str, explanation: PlanExplanation | None) -> None:
        """The text has ended, for this finish reason."""
        self._stats = stats, reason
        self._meter.done(stats, reason, explanation)

    def _log(self, error: BaseException | None) -> None:
        """One line a request; whether it may hold the prompt is the operator's choice."""
        if self._tokenizer is not None:
            logger.info("request was: prompt=%s", self._tokenizer.decode(self._prompt))
        if self._stats is None:
            logger.info(
                "request failed: tenant=%s trace=%s prompt_tokens=%d seconds=%.3f reason=%s error=%s",
                self._tenant, self._trace, len(self._prompt), time.perf_counter() - self.arrived,
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
