"""The static engine, on a CPU, against the plain forward pass: padding, pages and masks may change no logits."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from paceline.engine import checks, decoder
from paceline.engine.cuda import attention, buckets
from paceline.engine.cuda.buckets import PAGE_ROWS, groups_of
from paceline.engine.cuda.graphs import MAX_GRAPHS, GraphRunner, StepRunner
from paceline.engine.cuda.kernels import TORCH
from paceline.engine.cuda.pages import PagePool
from paceline.engine.cuda.static_engine import StaticEngine
from paceline.engine.interface import Prefix, Ranking, StepItem, StepPlan
from paceline.protocol.errors import InvalidInput, Overloaded, Unsupported
from paceline.protocol.proposal import ROOT
from paceline.protocol.sampling import NoiseKey
from tests.engine import tiny
from tests.engine.test_growth import check_growth, positions_by_row
from tests.engine.test_transformer import run_writers
from tests.engine.tiny import ROW_BYTES, chain, step


def static(config: Any, dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[StaticEngine, tiny.Plain]:
    model = tiny.random_model(config).to(dtype)  # type: ignore[arg-type]  # what transformers annotates is not its own
    plain = tiny.Plain(model)
    return tiny.static(model, **{"kv_bytes": 1600 * ROW_BYTES * 4, **settings}), plain


@pytest.fixture(scope="module", params=list(tiny.FAMILIES))
def family(request: pytest.FixtureRequest) -> tuple[StaticEngine, tiny.Plain]:
    return static(tiny.FAMILIES[request.param]())


@pytest.fixture(scope="module")
def llama() -> tuple[StaticEngine, tiny.Plain]:
    return static(tiny.llama())


def free_rows(engine: StaticEngine) -> int:
    return len(engine._pool._free) * PAGE_ROWS


@pytest.mark.parametrize("seed", [0, *tiny.in_full(1)])
def test_random_ragged_batches(family: tuple[StaticEngine, tiny.Plain], seed: int) -> None:
    run_writers(*family, seed)
    assert free_rows(family[0]) == family[0].info.max_kv_rows


class Replaying:
    """What a graph does, without one: a shape's first body is all that ever runs for it."""

    def __init__(self) -> None:
        self._bodies: dict[Any, Callable[[], None]] = {}
        self.replays = 0

    @property
    def graphs(self) -> int:
        return len(self._bodies)

    def run(self, shape: Hashable, body: Callable[[], None]) -> None:
        self.replays += shape in self._bodies
        self._bodies.setdefault(shape, body)()


class Capturing(Replaying, GraphRunner):
    """The same, where an engine takes it for one with graphs."""


@pytest.fixture
def replaying(monkeypatch: pytest.MonkeyPatch) -> Replaying:
    runner = Capturing()
    monkeypatch.setattr(decoder, "runner_for", lambda device, *, graphs: runner)
    return runner


def test_a_step_is_a_function_of_its_static_buffers(replaying: Replaying) -> None:
    engine, plain = static(tiny.llama())
    for seed in (0, 1, 0):
        run_writers(engine, plain, seed)
    assert replaying.replays >= replaying.graphs > 10


def draw_together(engine: StaticEngine, sessions: int, rows: int, base: int = 1) -> None:
    """Draw `rows` tokens of each of some sessions in one step, behind `base` tokens."""
    for session in range(sessions):
        engine.open(session, base + rows)
        engine.step(StepPlan((StepItem(session, 0, (1,) * base),)))
    items = tuple(StepItem(s, base, (1,) * rows, logit_rows=tuple(range(rows))) for s in range(sessions))
    rankings = [Ranking(NoiseKey(s), 1.0, tuple(range(base + 1, base + rows + 1))) for s in range(sessions)]
    engine.step_and_rank(StepPlan(items), rankings)
    for session in range(sessions):
        engine.close(session)


@pytest.mark.parametrize("captured_at_start", [True, False])
def test_common_steps_have_graphs_from_the_start(
    replaying: Replaying, monkeypatch: pytest.MonkeyPatch, captured_at_start: bool
) -> None:
    if not captured_at_start:  # a mutant
        monkeypatch.setattr(StaticEngine, "warm_up", lambda self, shapes: None)
    engine, plain = static(tiny.llama(), max_num_seqs=4)
    shapes = buckets.common_shapes(4, tiny.CONTEXT, tiny.VOCAB, 1)
    captured_shapes = [shape for shape in shapes if shape in replaying._bodies]
    assert (len(captured_shapes) == len(shapes) == 3 * 2 * 3 + 6) is captured_at_start
    assert [shape.rows for shape in shapes] == sorted((shape.rows for shape in shapes), reverse=True)
    for sessions, rows, base in ((1, 1, 100), (3, 1, 140), (2, 7, 200), (4, 8, 100)):
        draw_together(engine, sessions, rows, base)
        newest = [*replaying._bodies][-1]
        assert (newest.raced_rows == 0) is captured_at_start, "of what drew, nothing is new"
    run_writers(engine, plain, 1)
    most = buckets.common_shapes(1 << 16, 1 << 20, 128_000, 2)
    assert len({*most}) == len(most) == 96
    assert len(most) <= MAX_GRAPHS / 2, "they leave room for the others"


@pytest.mark.parametrize(("rows", "has_graph"), [(1024, True), (256, False)])
def test_a_step_of_hundreds_of_rows_has_a_graph(replaying: Replaying, rows: int, has_graph: bool) -> None:
    """64 sessions with proposals of 4 have 320 rows, padded to 512. Rows that no step can have take no memory."""
    engine, _ = static(tiny.llama(), kv_bytes=64 * PAGE_ROWS * ROW_BYTES, max_num_seqs=64, max_step_rows=rows)
    assert len(engine._static.logits) == rows
    draw_together(engine, 64, 5)
    raced_rows = {shape.raced_rows for shape in replaying._bodies}
    assert (512 in raced_rows) is has_graph


def test_trees_that_grow(llama: tuple[StaticEngine, tiny.Plain]) -> None:
    check_growth(*llama, 0)


@pytest.mark.parametrize("edge", [1, PAGE_ROWS, 127, 128, 192])
def test_the_edges_of_buckets(llama: tuple[StaticEngine, tiny.Plain], edge: int) -> None:
    engine, plain = llama
    tokens = random.Random(edge).choices(range(tiny.VOCAB), k=edge + 2)
    engine.open(1, edge + 2)
    step(engine, StepItem(1, 0, tuple(tokens[:edge])))
    for row in (edge, edge + 1):
        plain.assert_row(step(engine, chain(1, row, tokens[row : row + 1]))[0], tokens[: row + 1])
    engine.close(1)


def test_trees_of_more_than_a_word_beside_long_chunks(llama: tuple[StaticEngine, tiny.Plain]) -> None:
    engine, plain = llama
    source = random.Random(7)
    tokens = source.choices(range(tiny.VOCAB), k=130)
    parents = tuple(source.randint(max(-1, row - 4), row - 1) for row in range(60))
    tree = tuple(source.choices(range(tiny.VOCAB), k=60))
    engine.open(1, 220)
    engine.open(2, 140)
    step(engine, StepItem(1, 0, tuple(tokens[:5])))
    engine.step(StepPlan((StepItem(1, 5, tree, parents), StepItem(2, 0, tuple(tokens[:3])))))
    more = (*parents, *(row - 1 for row in range(60, 80)))
    item = StepItem(1, 65, tuple(tokens[:20]), more, logit_rows=(0, 4, 19), trunk_length=5)
    first, second = engine.step(StepPlan((item, StepItem(2, 3, tuple(tokens[3:]), logit_rows=(126,)))))
    all_tokens = (*tree, *tokens[:20])
    for out, row in enumerate((60, 64, 79)):
        path: list[int] = []
        while row != ROOT:
            path.append(all_tokens[row])
            row = more[row]
        plain.assert_row(first[out], [*tokens[:5], *reversed(path)])
    plain.assert_row(second[0], tokens)
    for session in (1, 2):
        engine.close(session)


def test_prefixes_are_computed_once_and_every_row_is_accounted_for() -> None:
    engine, plain = static(tiny.llama(), kv_bytes=(20 * PAGE_ROWS + 5) * ROW_BYTES)
    assert engine.info.max_kv_rows == 20 * PAGE_ROWS
    text = random.Random(4).choices(range(tiny.VOCAB), k=75)
    prefix = Prefix((*text, 9), 75)

    def begin(session: int, rows: int = 100) -> int:
        reused = engine.open(session, rows, prefix)
        plain.assert_row(step(engine, chain(session, reused, [*text, 9][reused:]))[-1], [*text, 9])
        return reused

    assert [begin(session) for session in (1, 2)] == [0, 75]
    assert engine.kv_rows == 2 * 4 * PAGE_ROWS
    # The last block is short, and takes a page all the same.
    assert engine.cached_rows == 3 * PAGE_ROWS
    assert free_rows(engine) == (20 - 8 - 3) * PAGE_ROWS
    engine.close(1)
    engine.close(2)
    assert engine.kv_rows == 0
    assert free_rows(engine) == (20 - 3) * PAGE_ROWS
    # A session of the whole budget takes the pages of the blocks that it begins with.
    assert begin(3, 20 * PAGE_ROWS) == 75
    assert (engine.cached_rows, free_rows(engine)) == (0, 0)
    with pytest.raises(Overloaded):
        engine.open(4, 1)
    engine.close(3)
    assert free_rows(engine) == engine.info.max_kv_rows
    assert begin(5) == 0


def test_sessions_and_budgets_that_fit_no_pages_are_refused(llama: tuple[StaticEngine, tiny.Plain]) -> None:
    engine, _ = llama
    with pytest.raises(InvalidInput, match="the whole KV budget"):
        engine.open(2, engine.info.max_kv_rows + 1)
    with pytest.raises(InvalidInput, match="two pages"):
        static(tiny.llama(), kv_bytes=63 * ROW_BYTES)


def test_what_one_session_leaves_behind_reaches_no_other() -> None:
    """A page that held NaN is masked in its next session: 0 · NaN would be NaN."""
    engine, plain = static(tiny.llama(), kv_bytes=2 * PAGE_ROWS * ROW_BYTES)
    with torch.inference_mode():
        engine._pool.rows[:, :, : 2 * PAGE_ROWS] = float("nan")
        engine._pool.rows[:, :, engine._pool.scratch_row] = float("nan")
    plain.assert_row(tiny.read(engine, (1, 2, 3))[2], (1, 2, 3))


def test_items_share_a_shape_only_with_their_like() -> None:
    def item(base: int, new: int) -> StepItem:
        return StepItem(base, base, (0,) * new)

    items = [item(100, 5), item(5000, 3), item(120, 1), item(30, 100), item(1600, 2), item(1700, 2)]
    assert [group.items for group in groups_of(items)] == [(1, 4, 5), (0, 2), (3,)]
    assert [group.shape.sessions for group in groups_of(items)] == [4, 2, 1]
    many = groups_of([item(20_000 + session, 1) for session in range(9)])
    assert [len(group.items) for group in many] == [2, 2, 2, 2, 1]
    assert {group.shape.length * group.shape.sessions for group in many} <= {24_576, 49_152}


def _a_key_short(inputs: Any, fields: Any, shape: Any, zero_row: int) -> Any:
    held = _pool_rows(inputs, fields, shape, zero_row).view(shape.sessions, -1)
    return held.roll(1, 1).flatten()


_pool_rows, _rows_of = attention._pool_rows, PagePool.rows_of


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("pages.PagePool.rows_of", lambda *facts: _rows_of(*facts) + 1),
        ("packing._tree_bits", lambda item, _: np.full((len(item.token_ids), buckets.mask_words(item)), -1)),
        ("attention._pool_rows", _a_key_short),
        ("packing.depths", positions_by_row),
    ],
    ids=["written one row too far", "whole trees seen", "keys one row off", "positions by row"],
)
def test_the_comparison_catches(
    llama: tuple[StaticEngine, tiny.Plain], monkeypatch: pytest.MonkeyPatch, name: str, mutant: Callable[..., Any]
) -> None:
    monkeypatch.setattr(llama[0], "_runner", StepRunner())  # a graph would go on with what it was made of
    monkeypatch.setattr(llama[0], "_kernels", TORCH)
    monkeypatch.setattr(f"paceline.engine.cuda.{name}", mutant)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        run_writers(*llama, seed=1)


@pytest.mark.parametrize("mutant", ["", "rounding", "keys"])
def test_rounding_of_16_bits_refuses_no_deep_model(monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    """Twelve layers in bfloat16 round by 7 % of the largest logit, as real models do; keys one row off are 130 %."""
    if mutant == "rounding":  # a check that knows nothing of it
        monkeypatch.setattr(checks, "ROUNDING_SHARES", 0)
    if mutant == "keys":
        monkeypatch.setattr(attention, "_pool_rows", _a_key_short)
    with pytest.raises(Unsupported, match="packed logits differ") if mutant else nullcontext():
        static(tiny.llama(num_hidden_layers=12), torch.bfloat16, kernels="torch")
