"""A GGUF model behind the engine interface, computed by llama.cpp; `Engine` says what its methods promise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.engine.blocks import BlockStore
from paceline.engine.interface import NO_PREFIX, EngineInfo, Logits, Prefix, StepItem, StepPlan
from paceline.engine.ledger import RETRY_AFTER_MS, LedgerEngine
from paceline.engine.llama.sequences import SessionSequences, Wave, WavePlanner
from paceline.engine.llama.steps import BatchRows, LlamaContext
from paceline.protocol.errors import Overloaded
from paceline.runtime.config import EngineSettings


@dataclass(frozen=True)
class PassShape:
    """The shape of llama.cpp's passes.

    Attributes:
        rows: most rows of a pass.
        sequences: of the whole cache.
        alone: every session is computed by itself, in a stream of cells of its own, and a tree path by path.
        least: fewest rows of a pass; those that are missing are padding. Where it is over 1, all rows of a pass with
            logits have logits.
    """

    rows: int
    sequences: int
    alone: bool = False
    least: int = 1


@dataclass
class CachedRows:
    """The rows [start, end) of a block; `spans` are all that their sequence keeps, none of which overlap."""

    sequence: int
    start: int
    end: int
    spans: list[tuple[int, int]]

    def overlaps(self, start: int, end: int) -> bool:
        """Whether the sequence keeps some of these rows."""
        return any(first < end and start < last for first, last in self.spans)


@dataclass(eq=False)
class _PassLogits:
    """Logits of one pass, in the library's own memory until the next one."""

    rows: Logits


@dataclass
class _StepLogits:
    """Logits of a step's rows as they are computed, pass by pass."""

    missing: set[tuple[int, int]]
    """Rows whose logits are asked for and have not been computed: an item's index, and a row of its session."""
    places: dict[tuple[int, int], tuple[_PassLogits, int]] = field(default_factory=dict)
    latest: _PassLogits | None = None

    @classmethod
    def of_plan(cls, plan: StepPlan) -> _StepLogits:
        """Nothing has been computed yet."""
        asked = ((i, item.base_length + row) for i, item in enumerate(plan.items) for row in item.logit_rows)
        return cls(set(asked))

    def settle(self) -> None:
        """Copy what the next pass will overwrite."""
        if self.latest is not None:
            self.latest.rows = self.latest.rows.copy()
            self.latest = None

    def add(self, places: Mapping[tuple[int, int], int], logits: Logits) -> None:
        """Note the logits of rows, each by its number in a pass's."""
        self.missing.difference_update(places)
        self.latest = _PassLogits(logits)
        self.places |= {place: (self.latest, number) for place, number in places.items()}

    def of_item(self, index: int, item: StepItem, vocab_size: int) -> Logits:
        """Logits [len(item.logit_rows), V]."""
        places = [self.places[index, item.base_length + row] for row in item.logit_rows]
        if not places:
            return np.empty((0, vocab_size), np.float32)
        block, first = places[0]
        if all(each == (block, first + number) for number, each in enumerate(places)):
            return block.rows[first : first + len(places)]
        return np.stack([block.rows[number] for block, number in places])


class LlamaEngine(LedgerEngine[CachedRows]):
    """Sessions over one context of llama.cpp."""

    def __init__(self, context: LlamaContext, info: EngineInfo, settings: EngineSettings, shape: PassShape) -> None:
        """Serve a context; `shape` is what it was made for."""
        self._blocks: BlockStore[CachedRows] = BlockStore(release=lambda rows: self._evicted.append(rows))
        # Streams have cells of their own, which nothing can share.
        sharing = settings.model_copy(update={"prefix_reuse": False}) if shape.alone else settings
        super().__init__(info, sharing, self._blocks)
        self._context = context
        self.shape = shape
        self.invariance = "not measured"
        """What a row's bits depend on."""
        self._free = [*range(shape.sequences - 1, -1, -1)]
        self._sessions: dict[int, SessionSequences] = {}
        self._caches: dict[int, CachedRows] = {}
        """The latest block of each session that has shared some."""
        self._evicted: list[CachedRows] = []

    def open(self, session: int, max_rows: int, prefix: Prefix = NO_PREFIX) -> int:  # noqa: D102
        sequence = self._take()
        if sequence is None and self._drop_leaves():
            sequence = self._free.pop()
        if sequence is None:
            message = f"{self.shape.sequences} sequences of llama.cpp are in use"
            raise Overloaded(message, retry_after_ms=RETRY_AFTER_MS)
        try:
            blocks = self._ledger.open(session, max_rows, prefix)
        except Exception:
            self._free.append(sequence)
            raise
        for source, start, end in _spans(blocks):
            self._context.copy(source, sequence, start, end)
        self._drop_evicted()
        rows = self._ledger.rows(session)
        self._sessions[session] = SessionSequences([*prefix.token_ids[:rows]], rows, tips={sequence: rows - 1})
        return rows

    def close(self, session: int) -> None:  # noqa: D102
        rows = self._sessions.pop(session, None)
        if rows is not None:
            self._free += rows.release([*rows.tips], self._context)
        self._caches.pop(session, None)
        self._ledger.close(session)

    def step(self, plan: StepPlan) -> Sequence[Logits]:  # noqa: D102
        self._ledger.check(plan)
        sessions = [self._sessions[item.session] for item in plan.items]
        for rows, item in zip(sessions, plan.items, strict=True):
            self._free += rows.keep(item, self._context)
        logits = _StepLogits.of_plan(plan)
        try:
            self._compute(plan, sessions, logits)
        except Exception:
            for rows in sessions:
                self._free += rows.take_back(self._context)
            raise
        self._ledger.apply(plan)
        self._share(plan)
        vocab_size = self.info.fingerprint.vocab_size
        return [logits.of_item(index, item, vocab_size) for index, item in enumerate(plan.items)]

    def _compute(self, plan: StepPlan, sessions: Sequence[SessionSequences], logits: _StepLogits) -> None:
        take = (lambda: None) if self.shape.alone else self._take
        planners = [
            WavePlanner(rows, len(item.token_ids), self._context, take)
            for rows, item in zip(sessions, plan.items, strict=True)
        ]
        while pending := [index for index, planner in enumerate(planners) if not planner.is_done]:
            waves = {index: planners[index].next_wave() for index in pending}
            for group in ([index] for index in pending) if self.shape.alone else (pending,):
                rows = [place for index in group for place in _ordered(index, waves[index])]
                for start in range(0, len(rows), self.shape.rows):
                    self._run_pass(rows[start : start + self.shape.rows], sessions, logits)
            for index, wave in waves.items():
                planners[index].finish(wave)

    def _run_pass(
        self,
        rows: Sequence[tuple[int, int, Sequence[int]]],
        sessions: Sequence[SessionSequences],
        logits: _StepLogits,
    ) -> None:
        """Compute rows, each an item's index, a row of its session and the sequences that see it.

        The last layer computes only rows that have logits, so where shapes matter their number does, too.
        """
        whole = self.shape.least > 1 and any((index, row) in logits.missing for index, row, _ in rows)
        batch, places = BatchRows(), dict[tuple[int, int], int]()
        for index, row, sequences in rows:
            session, has_logits = sessions[index], (index, row) in logits.missing
            if has_logits:
                places[index, row] = len(batch) if whole else len(places)
            batch.add(session.tokens[row], session.position(row), sequences, has_logits=has_logits or whole)
        end = batch.positions[-1] + 1
        padding = self._padding(len(batch))
        for position in range(end, end + padding):
            batch.add(0, position, batch.sequences[-1], has_logits=whole)
        logits.settle()
        logits.add(places, self._context.decode(batch))
        if padding:
            self._context.remove(batch.sequences[-1][0], end)

    def _padding(self, rows: int) -> int:
        """Rows behind so many that a pass has only for its shape."""
        return max(0, self.shape.least - rows)

    def _take(self) -> int | None:
        """A free sequence, one that a block in no use gives up if need be; None: there is none."""
        while not self._free and self._blocks.held_rows:
            if not self._blocks.evict_to(self._blocks.held_rows - 1, idle_only=True):
                break
            self._drop_evicted()
        return self._free.pop() if self._free else None

    def _drop_leaves(self) -> bool:
        """Leave every session one sequence, and blocks in use none: their rows are computed again if they must be."""
        self._blocks.evict_to(0, idle_only=True)
        for rows in self._sessions.values():
            others = sorted(rows.tips, key=lambda sequence: rows.tips[sequence])[:-1]
            self._free += rows.release(others, self._context)
        if not self._free:
            self._blocks.evict_to(0)
        self._drop_evicted()
        return bool(self._free)

    def _share(self, plan: StepPlan) -> None:
        """Store the blocks that a step has completed; at another step, if sequences for them are short now.

        A session's blocks need a new sequence at most for the first one and behind a shorter one.
        """
        if len(self._free) < 2 * len(plan.items):
            return
        self._ledger.share(plan, self._cached_rows)
        self._drop_evicted()

    def _cached_rows(self, session: int, start: int, end: int) -> CachedRows:
        cache = self._caches.get(session)
        if cache is None or not cache.spans or cache.overlaps(start, end):
            cache = CachedRows(self._free.pop(), start, end, [])
        rows = self._sessions[session]
        source = max(rows.tips, key=lambda each: rows.tips[each])
        self._context.copy(source, cache.sequence, start, end)
        cache.spans.append((start, end))
        self._caches[session] = CachedRows(cache.sequence, start, end, cache.spans)
        return self._caches[session]

    def _drop_evicted(self) -> None:
        """Free the cells of blocks that were evicted, and sequences that keep no block."""
        for rows in self._evicted:
            self._context.remove_between(rows.sequence, rows.start, rows.end)
            rows.spans.remove((rows.start, rows.end))
            if not rows.spans:
                self._free.append(rows.sequence)
        self._evicted.clear()


def _ordered(index: int, wave: Wave) -> list[tuple[int, int, Sequence[int]]]:
    """An item's rows of a wave, parents first."""
    return [(index, row, wave.rows[row]) for row in sorted(wave.rows)]


def _spans(blocks: Iterable[CachedRows]) -> Iterator[tuple[int, int, int]]:
    """Sequence, start and end of blocks, those that lie in one sequence behind each other joined."""
    spans: list[tuple[int, int, int]] = []
    for block in blocks:
        if spans and spans[-1][0] == block.sequence and spans[-1][2] == block.start:
            spans[-1] = (block.sequence, spans[-1][1], block.end)
        else:
            spans.append((block.sequence, block.start, block.end))
    yield from spans
