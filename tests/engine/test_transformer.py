"""Packed steps against the plain whole-prefix forward pass."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from paceline.engine.interface import Engine, StepItem, StepPlan
from paceline.engine.transformer import TransformerEngine
from paceline.protocol.errors import InvalidInput, Overloaded, PrefixMismatch, UnknownSession
from paceline.protocol.proposal import ROOT
from tests.engine import tiny
from tests.engine.tiny import chain, step


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def family(request: pytest.FixtureRequest) -> tuple[Engine, tiny.Plain]:
    return tiny.engine_and_plain(tiny.FAMILIES[request.param]())


@pytest.fixture(scope="module")
def llama() -> tuple[Engine, tiny.Plain]:
    return tiny.engine_and_plain(tiny.llama())


@dataclass
class Writer:
    session: int
    random: random.Random
    kept: list[int] = field(default_factory=list)
    item: StepItem | None = None

    def next_item(self) -> StepItem:
        kept_path: tuple[int, ...] = ()
        base = len(self.kept)
        if self.item is not None:
            base, kept_path = self._accept(self.item)
        tokens = tuple(self.random.choices(range(tiny.VOCAB), k=self.random.randint(1, 9)))
        parents: tuple[int, ...] = ()
        if self.random.random() < 0.6:
            parents = tuple(self.random.randint(-1, row - 1) for row in range(len(tokens)))
        wanted = tuple(self.random.sample(range(len(tokens)), k=self.random.randint(0, len(tokens))))
        self.item = StepItem(self.session, base, tokens, parents, kept_path, wanted)
        return self.item

    def history(self, row: int) -> list[int]:
        assert self.item is not None
        path: list[int] = []
        while row != ROOT:
            path.append(self.item.token_ids[row])
            row = self.item.parent_of(row)
        return [*self.kept, *reversed(path)]

    def _accept(self, item: StepItem) -> tuple[int, tuple[int, ...]]:
        """Keep a random path of the last step, or roll some rows of the prefix back."""
        if self.random.random() < 0.2:
            del self.kept[self.random.randint(0, len(self.kept)) :]
            return len(self.kept), ()
        row = self.random.randint(-1, len(item.token_ids) - 1)
        path: list[int] = []
        node = row
        while node != ROOT:
            path.append(item.base_length + node)
            node = item.parent_of(node)
        self.kept = self.history(row)
        return len(self.kept), tuple(reversed(path))


def run_writers(engine: Engine, plain: tiny.Plain, seed: int) -> None:
    """Writers side by side: chunks, trees whose paths are kept, and rollbacks, also of whole sessions."""
    source = random.Random(seed)
    writers = [Writer(session, random.Random(source.random())) for session in range(4)]
    try:
        for writer in writers:
            engine.open(writer.session, 250)
        for _ in range(14):
            stepping = source.sample(writers, k=source.randint(1, len(writers)))
            plan = StepPlan(tuple(writer.next_item() for writer in stepping))
            for writer, item, logits in zip(stepping, plan.items, engine.step(plan), strict=True):
                assert logits.shape == (len(item.logit_rows), engine.info.fingerprint.vocab_size)
                for out, row in enumerate(item.logit_rows):
                    plain.assert_row(logits[out], writer.history(row))
    finally:
        for writer in writers:
            engine.close(writer.session)
    assert engine.kv_rows == 0


@pytest.mark.parametrize("seed", [0, *tiny.in_full(1, 2)])
def test_random_ragged_batches(family: tuple[Engine, tiny.Plain], seed: int) -> None:
    run_writers(*family, seed)


def test_a_session_holds_what_it_reserved(llama: tuple[Engine, tiny.Plain]) -> None:
    engine, plain = llama
    assert isinstance(engine, TransformerEngine)
    tokens = random.Random(2).choices(range(tiny.VOCAB), k=200)
    engine.open(1, 200)
    for base in (0, 100):
        logits = step(engine, chain(1, base, tokens[base : base + 100]))
        (kv,) = engine._kv.values()
        assert kv.capacity * engine._kv_shape.row_bytes == 200 * tiny.ROW_BYTES
    plain.assert_row(logits[99], tokens)
    engine.close(1)
    assert not engine._kv
    assert not engine.cached_rows


def test_the_budget_in_rows_follows_bytes() -> None:
    row_bytes = tiny.ROW_BYTES
    engine, _ = tiny.engine_and_plain(tiny.llama(), kv_bytes=100 * row_bytes + row_bytes // 2, max_num_seqs=3)
    assert engine.info.max_kv_rows == 100
    engine.open(1, 60)
    with pytest.raises(Overloaded, match="41 KV rows needed, 40 free"):
        engine.open(2, 41)
    with pytest.raises(InvalidInput, match="max_rows = 101"):
        engine.open(2, 101)
    engine.open(2, 10)
    engine.open(3, 10)
    with pytest.raises(Overloaded, match="3 sessions"):
        engine.open(4, 1)
    assert engine.kv_rows == 80
    for session in (1, 2, 3, 3, 99):
        engine.close(session)
    assert engine.kv_rows == 0


def test_a_refused_step_changes_nothing(llama: tuple[Engine, tiny.Plain]) -> None:
    engine, plain = llama
    engine.open(1, 16)
    step(engine, chain(1, 0, [5, 6]))
    good = chain(1, 0, [50])
    for bad, error in ((chain(7, 0, [1]), UnknownSession), (chain(1, 0, [1]), InvalidInput)):
        with pytest.raises(error):
            engine.step(StepPlan((good, bad)))
    with pytest.raises(PrefixMismatch):
        step(engine, chain(1, 3, [1]))
    plain.assert_row(step(engine, chain(1, 2, [7]))[0], [5, 6, 7])
    engine.close(1)


def test_threads_are_set_on_the_thread_that_steps(llama: tuple[Engine, tiny.Plain]) -> None:
    engine, _ = llama
    engine.open(1, 4)
    torch.set_num_threads(2)
    engine._threads._thread_id = None  # type: ignore[attr-defined]  # as if another thread had stepped before
    step(engine, chain(1, 0, [1]))
    assert torch.get_num_threads() == 1
    engine.close(1)
