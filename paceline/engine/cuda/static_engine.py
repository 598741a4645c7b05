"""The engine whose steps have few shapes: on a GPU each is a graph, and tokens are raced where the logits are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from paceline.engine.blocks import BlockStore
from paceline.engine.cuda.buckets import StepShape
from paceline.engine.cuda.candidates import RacedRows, candidates_of, clear_tokens
from paceline.engine.cuda.filters import MOST_K, shares_before
from paceline.engine.cuda.footprint import (
    CANDIDATE_NUMBERS,
    INPUT_INTEGERS,
    RACED_AT_ONCE,
    STATIC_STATES,
    static_rows,
)
from paceline.engine.cuda.graphs import GraphRunner, StepRunner, download, host_buffer, upload
from paceline.engine.cuda.kernels import kernels_of
from paceline.engine.cuda.layout import layout_of, part
from paceline.engine.cuda.packing import PackedStep, blank_step, pack
from paceline.engine.cuda.pages import PagePool, whole_pages
from paceline.engine.forward import forward
from paceline.engine.hidden_states import capture_states
from paceline.engine.interface import (
    NO_PREFIX,
    Draw,
    Drawing,
    Logits,
    Prefix,
    RankedRows,
    Ranking,
    StepPlan,
)
from paceline.engine.transformer import DecoderEngine, ServedDecoder
from paceline.protocol.proposal import Acceptance
from paceline.sampling.acceptance import draw_positions


class _PageBlock(NamedTuple):
    """A shared block's page, and its rows."""

    page: int
    rows: int


@dataclass(frozen=True)
class _Buffers:
    """The buffers of a step, on the device; `states` are on the host where the device has no room for them."""

    inputs: torch.Tensor  # [layout.size] int64
    logits: torch.Tensor  # [logit rows, V] float32; the raced rows first
    candidates: torch.Tensor  # [raced, row numbers] float64: as `race_candidates`, then as `shares_before`
    states: torch.Tensor  # [feature layers, rows, hidden]; [states, hidden] until cut to a shape


class StaticEngine(DecoderEngine[_PageBlock]):
    """A decoder behind the engine interface; `Engine`, `DrawingEngine` and `RankingEngine` say what it promises.

    Coupled draws that temperature and filters alone shape are raced on the device; whatever else is asked for gets
    logits.
    """

    def __init__(self, decoder: ServedDecoder, runner: StepRunner) -> None:
        """Take the pool and the static buffers.

        Raises:
            Unsupported: the device's race is not the reference's.
        """
        device = decoder.kv_shape.device
        self._kernels = kernels_of(decoder.settings.kernels, device)
        with torch.inference_mode():
            self._pool = pool = PagePool(decoder.kv_shape, decoder.info.max_kv_rows)
        # Not `self`: in a cycle, an engine and its graphs would keep their memory until a collection.
        release = lambda block: pool.release(block.page)  # noqa: E731
        super().__init__(decoder, BlockStore(whole_pages=True, release=release))
        self._runner = runner
        self._direct = StepRunner()
        self._hidden = 0 if self.info.features is None else self.info.features.hidden
        with torch.inference_mode():
            states = torch.empty((STATIC_STATES, self._hidden), dtype=decoder.kv_shape.dtype, device=device)
            rows = static_rows(decoder.settings)
            # A rank has logits of its share alone, and a padded vocabulary more than are used.
            vocab_size, head = self.info.fingerprint.vocab_size, self._model.get_output_embeddings()
            self._width: int = min(vocab_size, getattr(head, "out_features", vocab_size))
            self._static = self._make_buffers(INPUT_INTEGERS, rows, rows * CANDIDATE_NUMBERS, states)

    @property
    def has_graphs(self) -> bool:
        """Whether steps are captured."""
        return isinstance(self._runner, GraphRunner)

    @torch.inference_mode()
    def warm_up(self, shapes: Sequence[StepShape]) -> None:
        """Run each shape twice, of no sessions: where there are graphs, it is then captured before it is needed."""
        self._threads.bind()
        for shape in shapes:
            for _ in range(2):
                self._run(blank_step(shape, self._pool))

    @torch.inference_mode()
    def open(self, session: int, max_rows: int, prefix: Prefix = NO_PREFIX) -> int:  # noqa: D102
        blocks = self._ledger.open(session, whole_pages(max_rows), prefix)
        self._pool.open(session, max_rows)
        self._pool.copy_in(session, [block.page for block in blocks])
        return sum(block.rows for block in blocks)

    def close(self, session: int) -> None:  # noqa: D102
        self._ledger.close(session)
        self._pool.close(session)
        self._states.close(session)

    def step(self, plan: StepPlan) -> Sequence[Logits]:  # noqa: D102
        answers = self._step(plan, [None] * len(plan.items))
        return [answer for answer in answers if not isinstance(answer, RacedRows)]

    def step_and_draw(self, plan: StepPlan, draws: Sequence[Draw | None]) -> Sequence[Logits | Drawing]:  # noqa: D102
        rankings = [self._ranking_of(draw) for draw in draws]
        return self._step(plan, [*rankings, *[None] * (len(plan.items) - len(rankings))])

    def _ranking_of(self, draw: Draw | None) -> Ranking | None:
        """None: the definition draws, from logits."""
        if draw is None or draw.acceptance is not Acceptance.COUPLED or draw.filters.top_k > MOST_K:
            return None
        return Ranking(draw.noise, draw.temperature, draw_positions(draw.round_), filters=draw.filters)

    def step_and_rank(  # noqa: D102
        self, plan: StepPlan, rankings: Sequence[Ranking | None]
    ) -> Sequence[Logits | RankedRows]:
        return self._step(plan, rankings)

    @torch.inference_mode()
    def _step(self, plan: StepPlan, rankings: Sequence[Ranking | None]) -> list[Logits | RacedRows]:
        self._ledger.check(plan)
        self._threads.bind()
        self._pool.keep([(item.session, item.base_length, item.kept_rows) for item in plan.items])
        self._ledger.apply(plan)
        horizons = [kind.horizon for kind in self.attention.kinds]
        layers = self._states.begin(plan)
        vocab_size, gathered_rows = self.info.fingerprint.vocab_size, self._kernels.gathered_rows
        step = pack(plan, rankings, self._pool, vocab_size, horizons, layers, gathered_rows)
        buffers = self._run(step)
        raced_rows = step.shape.raced_rows
        numbers, logits = download(
            (buffers.candidates[: step.raced_rows], buffers.logits[raced_rows : raced_rows + step.plain_rows])
        )
        self._states.take_packed(plan, dict(zip(step.shape.feature_layers, buffers.states, strict=True)))
        self._ledger.share(plan, self._copy_block)
        candidates = candidates_of(numbers, step.shape.candidates, logits.shape[1], step.temperatures, step.filters)
        clear = clear_tokens(candidates, step.temperatures, step.counts)
        answers: list[Logits | RacedRows] = []
        for item, ranking, start in zip(plan.items, rankings, step.starts, strict=True):
            rows = slice(start, start + len(item.logit_rows))
            if ranking is None:
                answers.append(logits[rows])
                continue
            whole = partial(_download, buffers.logits, rows)
            answers.append(RacedRows(ranking, candidates[rows], whole, clear.of(rows)))
        return answers

    def _run(self, step: PackedStep) -> _Buffers:
        """Compute a step in the static buffers, as a graph; a step that doesn't fit there gets buffers of its own.

        Their hidden states are on the host, since the device's budget has no room for them.
        """
        shape, integers = step.shape, step.integers
        runner, room = self._runner, self._static
        if not (shape.uses_graph and _fits(shape, room)):
            states = host_buffer((shape.states, self._hidden), self._kv_shape.dtype, self._kv_shape.device)
            room = self._make_buffers(len(integers), shape.logit_rows, _candidate_numbers(shape), states)
            runner = self._direct
        buffers = _cut_buffers(room, shape)
        upload(integers, self._kv_shape.device, out=buffers.inputs)
        runner.run(shape, lambda: self._compute(shape, buffers))
        return buffers

    def _compute(self, shape: StepShape, buffers: _Buffers) -> None:
        """The whole step as a function of its buffers; nothing here may wait for the device."""
        layout, inputs = layout_of(shape), buffers.inputs
        attention = self._kernels.attention(inputs, layout, shape.groups, self._pool, self.attention)
        ids, positions = part(inputs, layout.token_ids), part(inputs, layout.positions)
        states = dict(zip(shape.feature_layers, buffers.states, strict=True))
        with capture_states(self._model, shape.feature_layers, out=states):
            logits = forward(self._model, attention, ids[None], positions[None], part(inputs, layout.logit_rows))
        buffers.logits.copy_(logits[:, : self._width])
        self._race(shape, buffers)

    def _race(self, shape: StepShape, buffers: _Buffers) -> None:
        layout, inputs = layout_of(shape), buffers.inputs
        counters, top_k = part(inputs, layout.counters), part(inputs, layout.top_k)
        temperatures = part(inputs, layout.temperatures).to(torch.int32).view(torch.float32)
        count, at_once = shape.candidates, RACED_AT_ONCE if shape.has_filters else self._kernels.raced_at_once
        for start in range(0, shape.raced_rows, at_once):
            rows = slice(start, min(start + at_once, shape.raced_rows))
            logits = buffers.logits[rows]
            candidates = self._kernels.race(logits, counters[rows], temperatures[rows], count)
            if shape.has_filters:
                ids = candidates[:, 2 + count : 2 + 2 * count].long()
                candidates = torch.cat(
                    (candidates, shares_before(logits, temperatures[rows], top_k[rows], ids)), dim=1
                )
            buffers.candidates[rows].copy_(candidates)

    def _make_buffers(self, integers: int, rows: int, candidate_numbers: int, states: torch.Tensor) -> _Buffers:
        device = self._kv_shape.device
        return _Buffers(
            torch.empty(integers, dtype=torch.int64, device=device),
            torch.empty((rows, self._width), dtype=torch.float32, device=device),
            torch.empty(candidate_numbers, dtype=torch.float64, device=device),
            states,
        )

    def _copy_block(self, session: int, start: int, end: int) -> _PageBlock:
        return _PageBlock(self._pool.copy_out(session, start), end - start)


def _download(logits: torch.Tensor, rows: slice) -> Logits:
    """Bring some rows of logits to the host."""
    return download((logits[rows],))[0]


def _candidate_numbers(shape: StepShape) -> int:
    return shape.raced_rows * shape.row_numbers


def _fits(shape: StepShape, room: _Buffers) -> bool:
    """Whether buffers have room for a step."""
    sizes = (layout_of(shape).size, shape.logit_rows, _candidate_numbers(shape), shape.states)
    buffers = (room.inputs, room.logits, room.candidates, room.states)
    return all(size <= len(buffer) for size, buffer in zip(sizes, buffers, strict=True))


def _cut_buffers(buffers: _Buffers, shape: StepShape) -> _Buffers:
    """The parts of the buffers that a shape uses; their addresses are the same every time."""
    return _Buffers(
        buffers.inputs[: layout_of(shape).size],
        buffers.logits[: shape.logit_rows],
        buffers.candidates[: _candidate_numbers(shape)].view(shape.raced_rows, shape.row_numbers),
        buffers.states[: shape.states].view(len(shape.feature_layers), shape.rows, buffers.states.shape[1]),
    )
