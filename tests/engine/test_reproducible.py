"""Reproducible mode: the logits of a text are the same bits on every way to it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import PreTrainedConfig

from paceline.engine import blocks
from paceline.engine.cpu.linear import PackedLinear
from paceline.engine.cpu.row_products import has_wide_vectors
from paceline.engine.interface import Engine, Logits, Prefix, StepItem, StepPlan
from paceline.engine.reproducible.shapes import BUCKET_ROWS, Pass, passes
from paceline.protocol.errors import InvalidInput, Unsupported
from paceline.protocol.proposal import ROOT
from tests.engine import tiny
from tests.engine.llama_engines import llama
from tests.engine.test_transformer import run_writers
from tests.engine.tiny import ROW_BYTES, chain, step

PROMPT, LENGTH = 100, 150
"""The text crosses the edge of a bucket, and its prompt ends inside a chunk, a block and a tile."""
# Wide enough that products of different row counts differ in their bits.
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 1536}
CONFIGS: dict[str, PreTrainedConfig | None] = {
    "two heads share keys": tiny.llama(**WIDE),
    "one key head": tiny.qwen2(**WIDE),
    "a key head each": tiny.gpt_neox(**WIDE),
    "llama.cpp": None,
}


def texts_of(count: int) -> list[tuple[int, ...]]:
    """Texts of which every other one shares its first 70 tokens with the first."""
    source = random.Random(8)
    made = [tuple(source.choices(range(tiny.VOCAB), k=LENGTH)) for _ in range(count)]
    return [text if i % 2 else (*made[0][:70], *text[70:]) for i, text in enumerate(made)]


TEXTS = texts_of(6)


@dataclass
class Writer:
    """A session that computes a text by random rounds, with drafts right and wrong, and is re-opened at times."""

    number: int
    text: tuple[int, ...]
    random: random.Random
    session: int = -1
    rows: int = 0
    prefix: int = 0
    kept: tuple[int, ...] = ()
    right: list[int] = field(default_factory=list)
    logits: dict[int, Logits] = field(default_factory=dict)  # by the position of their row

    def begin(self, engine: Engine, session: int) -> None:
        if self.session >= 0:
            engine.close(self.session)
        known = max(PROMPT, self.rows + 1)
        self.session, self.kept = session, ()
        self.rows = engine.open(session, LENGTH + 40, Prefix(self.text[:known], PROMPT - 1))
        self.prefix = known - 1

    def item(self) -> StepItem:
        if self.rows < self.prefix:
            rows = min(self.prefix - self.rows, self.random.randint(1, 70))
            return StepItem(self.session, self.rows, self.text[self.rows : self.rows + rows])
        right = self.text[self.rows : min(LENGTH, self.rows + self.random.choice([1, 1, 2, 5, 9, 12]))]
        wrong = [(token + self.random.randint(1, 9)) % tiny.VOCAB for token in right]
        if self.random.random() < 0.5:
            tokens: tuple[int, ...] = (*right, *wrong[:3])
            self.right = [*range(len(right))]
            parents: tuple[int, ...] = ()
        else:
            # Right and wrong rows take turns; wrong ones hang from the right one before.
            tokens = (right[0], *(token for pair in zip(wrong[1:], right[1:], strict=True) for token in pair))
            self.right = [*range(0, len(tokens), 2)]
            parents = (ROOT, *(2 * ((row - 1) // 2) for row in range(1, len(tokens))))
        wanted = tuple(range(len(tokens)))
        return StepItem(self.session, self.rows, tokens, parents, self.kept, wanted)

    def absorb(self, item: StepItem, logits: Logits) -> None:
        if not item.logit_rows:
            self.rows += len(item.token_ids)
            return
        for depth, row in enumerate(self.right):
            self.logits[self.rows + depth] = logits[row].copy()
        base = self.rows
        self.rows += len(self.right)
        self.kept = tuple(base + row for row in self.right) if item.parents else ()


def alone(engine: Engine, text: Sequence[int], end: int = LENGTH) -> dict[int, Logits]:
    """The reference: nobody else, the prompt in one step, then one row a step."""
    engine.open(0, end, Prefix(prompt_rows=PROMPT - 1))
    step(engine, StepItem(0, 0, tuple(text[: PROMPT - 1])))
    rows = {row: step(engine, chain(0, row, (text[row],)))[0].copy() for row in range(PROMPT - 1, end)}
    engine.close(0)
    return rows


def in_company(engine: Engine, seed: int) -> Iterator[Writer]:
    """All texts at once, by random schedules; yields each as it is done."""
    source = random.Random(seed)
    writers = [Writer(i, text, random.Random(source.random())) for i, text in enumerate(TEXTS)]
    waiting, open_now, session = [*writers], list[Writer](), 1
    while waiting or open_now:
        if waiting and (not open_now or source.random() < 0.4):
            open_now.append(waiting.pop())
            open_now[-1].begin(engine, session)
            session += 1
        stepping = source.sample(open_now, k=source.randint(1, len(open_now)))
        items = [writer.item() for writer in stepping]
        for writer, item, logits in zip(stepping, items, engine.step(StepPlan(tuple(items))), strict=True):
            writer.absorb(item, logits)
            if writer.rows >= LENGTH:
                engine.close(writer.session)
                open_now.remove(writer)
                yield writer
            elif source.random() < 0.05:
                writer.begin(engine, session)
                session += 1


def check(engine: Engine, references: Mapping[int, Mapping[int, Logits]], seed: int) -> None:
    for writer in in_company(engine, seed):
        for row, logits in writer.logits.items():
            np.testing.assert_array_equal(logits, references[writer.number][row], err_msg=f"row {row}")


Reference = tuple[Engine, dict[int, dict[int, Logits]]]


def referenced(config: PreTrainedConfig | None, **settings: Any) -> Reference:
    """An engine, of llama.cpp's where none is ours, and the logits of every text by its row, computed alone."""
    engine = llama(**settings) if config is None else tiny.engine_and_plain(config, **settings)[0]
    return engine, {i: alone(engine, text) for i, text in enumerate(TEXTS)}


@pytest.fixture(scope="module")
def two_share_keys() -> Reference:
    return referenced(CONFIGS["two heads share keys"], reproducible=True, reproducible_rows=8)


@pytest.fixture(scope="module")
def shared(request: pytest.FixtureRequest, two_share_keys: Reference) -> Reference:
    if request.param == "two heads share keys":
        return two_share_keys
    rows = {} if request.param == "llama.cpp" else {"reproducible_rows": 8}
    return referenced(CONFIGS[request.param], reproducible=True, **rows)


def _case(name: str, seed: int) -> Any:
    in_full = seed > 0 or name == "one key head"
    return pytest.param(name, seed, id=f"{name}-{seed}", marks=pytest.mark.full if in_full else ())


@pytest.mark.parametrize(
    ("shared", "seed"),
    [_case(name, seed) for name in CONFIGS for seed in range(3)],
    indirect=["shared"],
)
def test_any_schedule_gives_the_same_bits(shared: Reference, seed: int) -> None:
    check(*shared, seed)
    assert shared[0].kv_rows == 0


@pytest.mark.full
def test_without_reuse_too() -> None:
    check(*referenced(tiny.llama(**WIDE), reproducible=True, prefix_reuse=False), 0)


def test_another_engine_of_equal_fingerprint_gives_them_too(two_share_keys: Reference) -> None:
    engine, rows = two_share_keys
    again, plain = tiny.engine_and_plain(tiny.llama(**WIDE), reproducible=True, reproducible_rows=8)
    assert again.info.fingerprint == engine.info.fingerprint
    for row, logits in alone(again, TEXTS[0], PROMPT + 5).items():
        np.testing.assert_array_equal(logits, rows[0][row])
    run_writers(again, plain, 0)
    others = [tiny.engine_and_plain(tiny.llama(**WIDE), reproducible=fixed)[0] for fixed in (False, True)]
    assert len({each.info.fingerprint.numeric for each in (again, *others)}) == 3


def _unpadded(plan: StepPlan, prompt_rows: Mapping[int, int], decode_rows: int) -> list[Pass]:
    return [
        replace(each, rows=max(placed.pass_row + placed.end - placed.start for placed in each.placements))
        for each in passes(plan, prompt_rows, decode_rows)
    ]


def make_sensitive(patch: pytest.MonkeyPatch) -> None:
    """Make products depend on their number of rows, and attention on its length, visibly."""
    product, attend = PackedLinear.forward, functional.scaled_dot_product_attention

    def by_rows(self: PackedLinear, rows: torch.Tensor) -> torch.Tensor:
        return product(self, rows) * (1 + 1e-6 * (rows.shape[-2] % 11))

    def by_length(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **rest: Any) -> torch.Tensor:
        return attend(query, key, value, **rest) * (1 + 1e-6 * (key.shape[2] % 11))

    patch.setattr(PackedLinear, "forward", by_rows)
    patch.setattr(functional, "scaled_dot_product_attention", by_length)


@pytest.fixture(scope="module")
def sensitive_rows() -> dict[int, dict[int, Logits]]:
    with pytest.MonkeyPatch.context() as patch:
        make_sensitive(patch)
        return referenced(tiny.llama(**WIDE), reproducible=True)[1]


@pytest.fixture
def sensitive(monkeypatch: pytest.MonkeyPatch, sensitive_rows: dict[int, dict[int, Logits]]) -> Reference:
    """An engine without any rows of other tests, which may be a mutant's."""
    make_sensitive(monkeypatch)
    return tiny.engine_and_plain(tiny.llama(**WIDE), reproducible=True)[0], sensitive_rows


def test_a_sensitive_machine_is_no_worse(sensitive: Reference) -> None:
    check(*sensitive, 0)


def test_ragged_steps_do_not_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    make_sensitive(monkeypatch)
    monkeypatch.setattr("paceline.engine.decoder.has_wide_vectors", lambda: False)
    reference = referenced(tiny.llama(**WIDE))
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        check(*reference, 0)


@pytest.mark.skipif(not has_wide_vectors(), reason="this CPU has no compiled steps")
@pytest.mark.parametrize("seed", [0, *tiny.in_full(1)])
def test_compiled_steps_give_the_same_bits_without_fixed_shapes(seed: int) -> None:
    check(*referenced(tiny.llama(**WIDE)), seed)


def test_a_machine_where_rows_depend_on_their_index_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    make_sensitive(monkeypatch)
    monkeypatch.setattr("paceline.engine.reproducible.engine.passes", _unpadded)
    with pytest.raises(Unsupported, match="give different bits"):
        tiny.engine_and_plain(tiny.llama(**WIDE), reproducible=True)


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("passes", _unpadded),
        ("passes", lambda plan, rows, *rest: passes(plan, dict.fromkeys(rows, 0), *rest)),
        ("bucket", lambda rows: rows),
    ],
    ids=["unpadded steps", "prompts in decode shape", "attention over the rows at hand"],
)
def test_mutants(
    sensitive: Reference, monkeypatch: pytest.MonkeyPatch, name: str, mutant: Callable[..., Any]
) -> None:
    monkeypatch.setattr(f"paceline.engine.reproducible.{'shapes' if name == 'bucket' else 'engine'}.{name}", mutant)
    monkeypatch.setattr(f"paceline.engine.reproducible.engine.{name}", mutant)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        check(*sensitive, 0)


def reopened(engine: Engine, text: Sequence[int]) -> Logits:
    """Write a text, then continue it as a new prompt: rows that were output are prompt rows now."""
    prompt = (*text[: BUCKET_ROWS - 1], 5)
    engine.open(1, LENGTH, Prefix(tuple(text[:40]), 39))
    step(engine, StepItem(1, 0, tuple(text[:39])))
    for row in range(39, BUCKET_ROWS - 1, 8):
        step(engine, chain(1, row, text[row : row + 8]))
    engine.close(1)
    reused = engine.open(2, LENGTH, Prefix(prompt, BUCKET_ROWS - 1))
    logits = step(engine, chain(2, reused, prompt[reused:])).copy()
    engine.close(2)
    return logits[-1:]


def test_output_rows_are_not_taken_for_prompt_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    make_sensitive(monkeypatch)
    config = tiny.llama(**WIDE)
    plain, _ = tiny.engine_and_plain(config, reproducible=True, prefix_reuse=False)
    expected = reopened(plain, TEXTS[1])
    sharing, _ = tiny.engine_and_plain(config, reproducible=True)
    np.testing.assert_array_equal(reopened(sharing, TEXTS[1]), expected)

    key = blocks.block_key
    monkeypatch.setattr(blocks, "block_key", lambda before, tokens, _: key(before, tokens, blocks.Sharing()))
    mutant, _ = tiny.engine_and_plain(config, reproducible=True)
    assert not np.array_equal(reopened(mutant, TEXTS[1]), expected)


def test_a_budget_below_two_sessions_and_kept_trees_are_refused() -> None:
    with pytest.raises(InvalidInput, match="KV rows of kv_bytes = 128: must be at least 256"):
        tiny.engine_and_plain(tiny.llama(), reproducible=True, kv_bytes=255 * ROW_BYTES)
    engine, _ = tiny.engine_and_plain(tiny.llama(), reproducible=True, kv_bytes=260 * ROW_BYTES)
    assert engine.info.max_kv_rows == 256
    engine.open(1, 20)
    step(engine, StepItem(1, 0, (1, 2, 3), (-1, 0, 0)))
    with pytest.raises(InvalidInput, match="no kept trees"):
        step(engine, StepItem(1, 3, (4,), (-1, -1, 1), trunk_length=1))
