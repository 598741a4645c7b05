"""Rank 0's engine, and what the other ranks do: the same calls, each on its share of heads and vocabulary.

Every rank has an engine whose logits are those of its share of the vocabulary. A call that an engine
refuses (`PacelineError`) is refused by every rank alike, before anything is computed: the engines hold the
same sessions. Whatever else goes wrong on one rank ends the group, since the others would wait for it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.engine.interface import (
    NO_FILTERS,
    NO_PREFIX,
    Draw,
    Drawing,
    DrawnTokens,
    Engine,
    Logits,
    Prefix,
    StepPlan,
)
from paceline.engine.parallel.draws import Share, combine, draw_part, summarise, vocabulary_shares
from paceline.engine.parallel.group import Bytes, RankGroup
from paceline.engine.parallel.wire import Beat, CloseCommand, Command, Open, StepCommand, Stop, decode, encode
from paceline.engine.wrapped import WrappedEngine
from paceline.protocol.errors import PacelineError, PeerUnavailable

logger = logging.getLogger(__name__)

BEAT_SECONDS = 5.0
"""Rank 0 sends at least this often, so that the others notice a machine that has gone silently.

Chosen in docs/decisions/2026-11-21-ranks-talk-over-gloo-and-end-together.md, well below `COLLECTIVE_SECONDS`.
"""
_NO_BYTES: Bytes = np.empty(0, np.uint8)


class ParallelEngine(WrappedEngine):
    """All ranks as one engine, on rank 0; `Engine` and `DrawingEngine` say what its methods promise.

    Once a call has raised `PeerUnavailable` every later one does.
    """

    def __init__(self, inner: Engine, group: RankGroup, on_lost: Callable[[str], None] = lambda reason: None) -> None:
        """Lead the other ranks, which run `follow`.

        Args:
            inner: the engine of rank 0's share.
            group: all ranks.
            on_lost: called once with the reason, on any thread, when the group has failed.
        """
        super().__init__(inner)
        self._on_lost = on_lost
        self._group = group
        self._failure: PeerUnavailable | None = None
        self._turn = threading.RLock()
        self._calls = 0
        self._stopped = threading.Event()
        threading.Thread(target=self._beat, name="rank-beats", daemon=True).start()

    def open(self, session: int, max_rows: int, prefix: Prefix = NO_PREFIX) -> int:  # noqa: D102
        rows = self._inner.open(session, max_rows, prefix)
        self._tell(Open(session, max_rows, prefix))
        return rows

    def close(self, session: int) -> None:  # noqa: D102
        self._inner.close(session)
        self._tell(CloseCommand(session))

    def step(self, plan: StepPlan) -> Sequence[Logits]:  # noqa: D102
        answers = self.step_and_draw(plan, ())
        return [answer for answer in answers if isinstance(answer, np.ndarray)]

    def step_and_draw(self, plan: StepPlan, draws: Sequence[Draw | None]) -> Sequence[Logits | Drawing]:  # noqa: D102
        # Filters need the scores of ids that other ranks have.
        step = StepCommand(plan, tuple(draw if draw and draw.filters == NO_FILTERS else None for draw in draws))
        command = encode(step)
        with self._calling():
            self._group.tell(command)
            return run_step(self._inner, self._group, step)

    def stop(self) -> None:
        """Tell the other ranks to stop, and leave; harmless when one is gone already."""
        self._stopped.set()
        if self._failure is None:
            with contextlib.suppress(PeerUnavailable):
                self._tell(Stop())
                self._group.close()

    def _tell(self, command: Command) -> None:
        with self._calling():
            self._group.tell(encode(command))

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        """A call of all ranks, one at a time; any failure but a refusal ends the group."""
        with self._turn:
            if self._failure is not None:
                raise PeerUnavailable(self._failure.message)
            self._calls += 1
            try:
                yield
            except PacelineError:
                raise
            except Exception as error:
                logger.error("tensor-parallel group lost: error=%r", error)
                self._failure = PeerUnavailable(f"the tensor-parallel group of {self._group.size} ranks has failed")
                self._on_lost(self._failure.message)
                raise self._failure from error

    def _beat(self) -> None:
        while not self._stopped.wait(BEAT_SECONDS):
            calls = self._calls
            if not self._turn.acquire(timeout=self._group.step_seconds):
                if self._calls > calls:
                    continue
                self._on_lost(f"a step has taken {self._group.step_seconds:g} s")
                return
            try:
                if not self._stopped.is_set():  # the others leave once they have been told to stop
                    self._tell(Beat())
            except PeerUnavailable:
                return
            finally:
                self._turn.release()


def follow(engine: Engine, group: RankGroup) -> None:
    """Run the commands of rank 0, on any other rank, until it says stop.

    Raises:
        Exception: the group or this rank's share of a call has failed; the rank is of no more use.
    """
    while True:
        match decode(group.hear()):
            case Open(session, max_rows, prefix):
                engine.open(session, max_rows, prefix)
            case CloseCommand(session):
                engine.close(session)
            case StepCommand() as step:
                try:
                    run_step(engine, group, step)
                except PacelineError as error:
                    logger.debug("step refused, as by rank 0: error=%s", error.message)
            case Beat():
                pass
            case Stop():
                return


def run_step(engine: Engine, group: RankGroup, step: StepCommand) -> Sequence[Logits | Drawing]:
    """One rank's part of a step.

    Returns:
        On rank 0 the answers, for each item logits of the whole vocabulary or draws; elsewhere nothing.
    """
    rows = engine.step(step.plan)
    draws = (*step.draws, *(None,) * (len(rows) - len(step.draws)))
    vocab_size = engine.info.fingerprint.vocab_size
    shares = vocabulary_shares(vocab_size, group.size)
    share = shares[group.rank]
    summaries = _exchange_summaries(group, [summarise(d, r, share) for d, r in zip(draws, rows, strict=True) if d])
    parts: list[NDArray[np.float64]] = []
    whole: list[Logits] = []
    summary = iter(summaries)
    for draw, logits in zip(draws, rows, strict=True):
        if draw is None:
            whole.append(logits)
        else:
            parts.append(draw_part(draw, logits, share, next(summary)))
    messages = group.collect(_pack_message(parts, whole, len(shares[0]))) if parts or any(map(len, whole)) else None
    if group.rank != 0:
        return ()
    return _answers(draws, rows, shares, summaries, _NO_BYTES if messages is None else messages)


@dataclass(frozen=True)
class _CollectedDraw:
    """One round's parts of all ranks."""

    draw: Draw
    parts: NDArray[np.float64]  # [ranks, rows, 3]
    summaries: NDArray[np.float64]  # [ranks, k, 3]

    def drawn_tokens(self) -> DrawnTokens:
        return combine(self.draw, self.parts, self.summaries)


def _exchange_summaries(group: RankGroup, own_summaries: list[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
    """Every rank's summaries [ranks, k, 3] of each draw; nothing is sent if no draw has any."""
    lengths = [len(each) for each in own_summaries]
    if not sum(lengths):
        return [np.empty((group.size, 0, 3)) for _ in own_summaries]
    messages = group.exchange(np.concatenate(own_summaries).reshape(-1).view(np.uint8))
    rows = messages.view(np.float64).reshape(group.size, sum(lengths), 3)
    return np.split(rows, np.cumsum(lengths)[:-1], axis=1)


def _pack_message(parts: list[NDArray[np.float64]], whole: list[Logits], width: int) -> Bytes:
    """One rank's message: the parts of all draws, then logits padded to the widest share."""
    pieces = [np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in parts]
    for logits in whole:
        block = np.zeros((len(logits), width), np.float32)
        block[:, : logits.shape[1]] = logits
        pieces.append(block.reshape(-1).view(np.uint8))
    return np.concatenate(pieces)


def _answers(
    draws: Sequence[Draw | None],
    rows: Sequence[Logits],
    shares: Sequence[Share],
    summaries: list[NDArray[np.float64]],
    messages: Bytes,  # [ranks, n]
) -> list[Logits | Drawing]:
    ranks, width, offset = len(shares), len(shares[0]), 0
    answers: dict[int, Logits | Drawing] = {}
    summary = iter(summaries)
    # The order of `_pack_message`: draws, then logits.
    for index in sorted(range(len(draws)), key=lambda index: draws[index] is None):
        draw, count = draws[index], len(rows[index])
        size = count * (3 * 8 if draw is not None else width * 4)
        piece = np.ascontiguousarray(messages[:, offset : offset + size]) if count else np.empty((ranks, 0), np.uint8)
        offset += size
        if draw is not None:
            answers[index] = _CollectedDraw(draw, piece.view(np.float64).reshape(ranks, count, 3), next(summary))
        else:
            blocks = piece.view(np.float32).reshape(ranks, count, width)
            answers[index] = np.concatenate([b[:, : len(s)] for b, s in zip(blocks, shares, strict=True)], axis=1)
    return [answers[index] for index in range(len(draws))]
