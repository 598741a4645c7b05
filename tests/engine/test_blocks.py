"""Shared blocks: which rows a session may take, what holds the budget, what is evicted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.engine import blocks
from paceline.engine.blocks import BLOCK_ROWS, BlockKey, Sharing, prefix_keys
from paceline.engine.interface import Engine, Prefix, StepItem, StepPlan
from paceline.engine.ledger import Ledger
from paceline.engine.table.engine import TableEngine, TableModel
from paceline.models.table_names import TableSpec
from paceline.runtime.config import EngineSettings
from tests.engine.tiny import chain, step

SPEC = TableSpec(vocab=32, contexts=4_099, max_kv_rows=600)
DISTRIBUTION = TableModel(SPEC)
SYSTEM = tuple(random.Random(5).choices(range(32), k=70))


def prefix(*tail: int, of: Sequence[int] = SYSTEM) -> Prefix:
    return Prefix((*of, *tail), len(of) + len(tail) - 1)


def begin(engine: Engine, session: int, of: Prefix, rows: int = 150) -> int:
    """Open a session and compute all of its prefix; returns the rows it began with."""
    reused = engine.open(session, rows, of)
    rest = of.token_ids[reused:]
    logits = step(engine, StepItem(session, reused, rest, logit_rows=(len(rest) - 1,)))
    np.testing.assert_array_equal(logits[0], DISTRIBUTION.logits(of.token_ids))
    return reused


def test_full_blocks_of_a_common_prefix_are_taken_and_the_distribution_holds() -> None:
    engine = TableEngine(SPEC)
    assert begin(engine, 1, prefix(3, 4)) == 0
    assert begin(engine, 2, prefix(5, 6)) == 2 * BLOCK_ROWS
    assert engine.cached_rows == 2 * BLOCK_ROWS + 2 * (71 - 2 * BLOCK_ROWS)
    for session in (1, 2):
        engine.close(session)
    assert engine.kv_rows == 0
    assert begin(engine, 3, prefix(9)) == 2 * BLOCK_ROWS
    assert begin(engine, 4, prefix(9)) == len(SYSTEM), "samples of one prompt compute a row each"


def _reused_by_two(first: str, second: str) -> int:
    """Rows that a session of one tenant takes from a session of another, with the same prompt and the same text."""
    engine = TableEngine(SPEC)
    text = (*SYSTEM, *SYSTEM)
    begin(engine, 1, Prefix(text, len(SYSTEM) - 1, first))
    return begin(engine, 2, Prefix(text, len(SYSTEM) - 1, second))


def test_rows_are_shared_within_a_tenant_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _reused_by_two("ann", "ann") == 2 * len(SYSTEM) - 1
    assert _reused_by_two("", "") == 2 * len(SYSTEM) - 1
    for other in (("ann", "bob"), ("", "bob"), ("ann", ""), ("ann", "ann ")):
        assert _reused_by_two(*other) == 0
    # A mutant: keys that know no tenant.
    monkeypatch.setattr(blocks, "block_key", lambda *facts: _block_key(*facts[:2], replace(facts[2], tenant="")))
    assert _reused_by_two("ann", "bob") == 2 * len(SYSTEM) - 1


def test_no_tenant_has_a_name_that_passes_for_tokens() -> None:
    name = (7).to_bytes(8, "little").decode()
    assert not {key.digest for key in prefix_keys(prefix(of=(7, 1, 2)), reproducible=False)} & {
        key.digest for key in prefix_keys(Prefix((1, 2), 1, name), reproducible=False)
    }


def test_a_prompt_goes_on_from_what_was_written_before() -> None:
    engine = TableEngine(SPEC)
    begin(engine, 1, prefix(3))
    text = [*SYSTEM, 3]
    for _ in range(40):
        step(engine, chain(1, len(text), (7,)))
        text.append(7)
    engine.close(1)
    assert begin(engine, 2, prefix(1, 2, of=text)) == len(text) // BLOCK_ROWS * BLOCK_ROWS


def test_rejected_rows_are_never_shared() -> None:
    engine = TableEngine(SPEC)
    begin(engine, 1, prefix(of=SYSTEM[:60]))
    wrong, right = tuple(range(8)), tuple(range(8, 16))
    for item in (chain(1, 60, wrong), chain(1, 60, right), chain(1, 68, (1,))):
        step(engine, item)
    assert begin(engine, 2, prefix(of=(*SYSTEM[:60], *wrong, 1))) == BLOCK_ROWS
    assert begin(engine, 3, prefix(of=(*SYSTEM[:60], *right, 1))) == 2 * BLOCK_ROWS


def test_a_session_without_a_prefix_shares_nothing_and_reuse_can_be_off() -> None:
    engine = TableEngine(SPEC)
    engine.open(1, 100)
    step(engine, StepItem(1, 0, SYSTEM))
    assert engine.cached_rows == 0
    off = TableEngine(SPEC, EngineSettings(prefix_reuse=False))
    assert [begin(off, session, prefix(3)) for session in (1, 2)] == [0, 0]
    assert off.cached_rows == 0


def test_blocks_make_way_for_sessions_and_the_idle_ones_first() -> None:
    engine = TableEngine(SPEC)
    for session, first in ((1, 1), (2, 2), (3, 3)):
        begin(engine, session, prefix(of=(first, *SYSTEM)), rows=80)
    engine.close(2)
    assert (engine.kv_rows, engine.cached_rows) == (160, 3 * 70)
    engine.open(4, 600 - 160 - 2 * 70)
    assert engine.cached_rows == 2 * 70
    engine.close(4)
    assert engine.open(5, 80, prefix(of=(1, *SYSTEM))) == 70
    assert engine.open(6, 80, prefix(of=(2, *SYSTEM))) == 0
    engine.open(7, 600 - 320)
    assert (engine.kv_rows, engine.cached_rows) == (600, 0)
    for session in (1, 3, 5, 6, 7):
        engine.close(session)
    assert (engine.kv_rows, engine.cached_rows) == (0, 0)


def test_the_oldest_idle_block_goes_first_and_a_chain_from_its_end() -> None:
    engine = TableEngine(SPEC)
    for session, first in ((1, 1), (2, 2), (3, 1)):
        begin(engine, session, prefix(of=(first, *SYSTEM)), rows=80)
        engine.close(session)
    engine.open(9, 600 - 70 - BLOCK_ROWS)
    assert engine.cached_rows == 70 + BLOCK_ROWS
    engine.close(9)
    assert engine.open(4, 80, prefix(of=(2, *SYSTEM))) == BLOCK_ROWS
    assert engine.open(5, 80, prefix(of=(1, *SYSTEM))) == 70


@pytest.mark.parametrize("seed", range(2))
def test_the_budget_holds_whatever_happens(seed: int) -> None:
    source = random.Random(seed)
    ledger: Ledger[None] = Ledger(
        TableEngine(TableSpec(vocab=8, max_length=200, max_kv_rows=500)).info, EngineSettings(max_num_seqs=9)
    )
    held: dict[int, int] = {}
    for number in range(300):
        if held and source.random() < 0.5:
            session = source.choice([*held])
            ledger.close(session)
            del held[session]
        elif sum(held.values()) + 120 <= 500:
            tokens = tuple(source.choices(range(2), k=source.choice([3, 40, 64, 100])))
            ledger.open(number, 120, Prefix(tokens, len(tokens) - 1))
            held[number] = 120
            start = ledger.rows(number)
            plan = StepPlan((StepItem(number, start, tokens[start:]),))
            ledger.check(plan)
            ledger.apply(plan)
            ledger.share(plan, lambda session, start, end: None)
        assert ledger.kv_rows == sum(held.values())
        assert ledger.kv_rows + ledger.cached_rows <= 500
    for session in held:
        ledger.close(session)
    ledger.open(-1, 500)
    assert (ledger.kv_rows, ledger.cached_rows) == (500, 0)


_block_key: Callable[..., Any] = blocks.block_key


def test_mutant_reuse_across_different_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_its_own_tokens(before: BlockKey | None, tokens: Sequence[int], sharing: Sharing) -> BlockKey:
        start = 0 if before is None else before.end
        return BlockKey(_block_key(None, tokens, sharing).digest, start, start + len(tokens))

    monkeypatch.setattr(blocks, "block_key", of_its_own_tokens)
    engine = TableEngine(SPEC)
    begin(engine, 1, prefix(of=(*SYSTEM[:32], *SYSTEM[:32], 1)))
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        begin(engine, 2, prefix(of=(*SYSTEM[:32], *SYSTEM[:32], *SYSTEM[:32], 1)))
