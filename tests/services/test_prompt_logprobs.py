"""A prompt's log-probabilities over real links: those of a direct computation, whatever is cached, shared or cut."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from paceline.engine.cpu.row_products import has_wide_vectors
from paceline.engine.decoder import build_engine
from paceline.engine.interface import PROMPT_LOGITS, Engine, Logits, StepItem, StepPlan, prompt_logit_rows
from paceline.models.table_names import TableSpec
from paceline.models.tokenizer import TableTokenizer
from paceline.protocol.errors import InvalidInput
from paceline.protocol.session import Close, Failure
from paceline.protocol.target import MAX_PIECE_ROWS, PromptPiece, RowLogprobs, TargetOpened, Verdict
from paceline.runtime.config import EngineSettings
from paceline.sampling.distribution import token_logprobs
from target_service import scheduler, step
from target_service.prompt_rows import ReportedRows
from tests.engine import tiny
from tests.engine.test_quantization import rounded
from tests.services.expected import next_token
from tests.services.harness import (
    Events,
    RecordingEngine,
    chain,
    eventually,
    first_round,
    linked_target,
    target_open,
    verdict_of,
)
from tests.services.reports import CLOSE, TOP, DirectReport, by_table, by_transformers, reported, rows_of

PROMPT = tuple(random.Random(6).choices(range(32), k=150))
EXACT = 1e-6
"""float32's rounding on the wire."""


async def report_of(events: Events, session: int, prompt: Sequence[int] = PROMPT, **asked: Any) -> list[RowLogprobs]:
    """A session's whole report; the session is closed."""
    opening = target_open(session, prompt, **({"prompt_logprobs": TOP} | asked))
    pieces, _ = await reported(events, opening)
    events.send(Close(session))
    return rows_of(pieces, opening.prompt_logprobs_known)


def logit_rows(plan: StepPlan) -> int:
    """Rows with logits before the last of `PROMPT`."""
    return sum(item.base_length + row < len(PROMPT) - 1 for item in plan.items for row in item.logit_rows)


def torch_engine(kind: str) -> tuple[Engine, DirectReport, tuple[int, ...]]:
    """An engine of a tiny checkpoint, and what transformers says of a prompt of it."""
    compiled = kind in ("compiled", "int8")
    model = tiny.biased(tiny.random_model(tiny.qwen_coder() if compiled else tiny.llama()))
    prompt = tuple(random.Random(8).choices(range(tiny.VOCAB), k=140))
    reference = rounded(model) if kind == "int8" else copy.deepcopy(model)
    reference.train(False)
    direct = by_transformers(reference, prompt)
    settings = EngineSettings.model_validate(
        {"threads": 1, "quantization": "int8" if kind == "int8" else "none", "reproducible": kind == "reproducible"}
    )
    engine = build_engine(model, TableTokenizer(tiny.VOCAB, None), settings, "tiny", static=kind == "static" or None)
    return engine, direct, prompt


WIDE = pytest.mark.skipif(not has_wide_vectors(), reason="this CPU has no vectors of 512 bits")


@pytest.mark.parametrize(
    "kind",
    ["plain", "reproducible", "static", pytest.param("compiled", marks=WIDE), pytest.param("int8", marks=WIDE)],
)
async def test_every_engine_reports_what_transformers_computes(kind: str) -> None:
    engine, direct, prompt = torch_engine(kind)
    reproducible = kind == "reproducible"
    async with linked_target(engine, prefill_chunk=48, reproducible=reproducible) as events:
        first = await report_of(events, 1, prompt)
        cached = await report_of(events, 2, prompt)
        behind = await report_of(events, 3, prompt, prompt_logprobs_known=77)
        others = await asyncio.gather(*(report_of(events, i, prompt[: 60 + i]) for i in range(4, 8)))
    for rows, known in ((first, 0), (cached, 0), (behind, 77), *((rows, 0) for rows in others)):
        assert direct.differs(prompt, rows, known + 1) < CLOSE
    assert len(first) == len(cached) == len(prompt) - 1
    assert len(behind) == len(prompt) - 1 - 77
    assert [len(rows) for rows in others] == [63, 64, 65, 66]
    if reproducible:
        assert first == cached, "the same bits, whatever is cached"
        assert first[77:] == behind
        assert [first[: len(rows)] for rows in others] == others


async def test_a_report_comes_in_order_before_anything_else_and_in_bounded_pieces() -> None:
    prompt = tuple(random.Random(7).choices(range(32), k=700))
    engine = RecordingEngine(TableSpec(vocab=32, seed=3, max_length=1024))
    async with linked_target(engine, prefill_chunk=600) as events:
        events.send(target_open(1, prompt, prompt_logprobs=20))
        verdict = await events.answer(first_round(1, prompt, chain([1, 2, 3])), Verdict)
        assert events.has(TargetOpened, 1), "it came before the verdict"
        pieces = events.take_all(PromptPiece)
    rows = rows_of(pieces)
    assert MAX_PIECE_ROWS == 256
    assert [len(piece.rows) for piece in pieces] == [256, 256, 64, 123], "chunks end at blocks"
    assert by_table(prompt).differs(prompt, rows) < EXACT
    assert all(len(row.token_ids) == 21 for row in rows)
    assert verdict.token_ids[0] == next_token(prompt)
    assert engine.plans[-1].items[0].logit_rows == (0, 1, 2, 3), "the round has logits of its own alone"


@pytest.mark.parametrize("top", [0, 20])
async def test_short_prompts_and_resumed_ones(top: int, target: Events) -> None:
    assert await report_of(target, 1, (5,), prompt_logprobs=top) == []
    rows = await report_of(target, 2, (5, 9), prompt_logprobs=top)
    assert by_table((5, 9)).differs((5, 9), rows) < EXACT
    assert [len(row.token_ids) for row in rows] == [1 + top]
    resumed = await report_of(target, 3, PROMPT, prompt_length=60, prompt_logprobs=top)
    assert len(resumed) == 59, "of the prompt, not of the output"
    assert by_table(PROMPT).differs(PROMPT, resumed) < EXACT
    target.send(target_open(4, PROMPT, prompt_length=60, prompt_logprobs=top))
    assert (await verdict_of(target, first_round(4, PROMPT))).token_ids == (next_token(PROMPT),)


async def test_cached_rows_are_computed_again_and_others_share_them(engine: RecordingEngine, target: Events) -> None:
    pieces, opened = await reported(target, target_open(1, PROMPT, prompt_logprobs=TOP))
    assert opened.reused_tokens == 0
    opened = await target.answer(target_open(2, PROMPT), TargetOpened)
    assert opened.reused_tokens == len(PROMPT) - 1, "what a report computes is shared"
    cached, opened = await reported(target, target_open(3, PROMPT, prompt_logprobs=TOP))
    assert opened.reused_tokens == 0
    assert rows_of(cached) == rows_of(pieces)
    behind, opened = await reported(target, target_open(4, PROMPT, prompt_logprobs=TOP, prompt_logprobs_known=70))
    assert opened.reused_tokens == 70, "rows that nothing is asked of are taken"
    assert rows_of(behind, 70) == rows_of(pieces)[70:]
    for session in (1, 2, 3, 4):
        assert (await verdict_of(target, first_round(session, PROMPT))).token_ids == (next_token(PROMPT),)
        target.send(Close(session))
    await eventually(lambda: engine.kv_rows == 0, "all rows are free")
    assert sum(map(logit_rows, engine.plans)) == 3 * (len(PROMPT) - 1) - 70


async def test_a_report_waits_for_no_leader_and_leads_those_that_do() -> None:
    engine = RecordingEngine()
    async with linked_target(engine, prefill_chunk=32) as events:
        await engine.hold(events, target_open(1, PROMPT))
        events.send(target_open(2, PROMPT, prompt_logprobs=TOP), target_open(3, PROMPT))
        other = tuple(reversed(PROMPT))
        await events.handled(target_open(4, other, prompt_logprobs=TOP), target_open(5, other))
        engine.go.set()
        opened = {i: (await events.of(TargetOpened, i)).reused_tokens for i in range(1, 6)}
        assert opened == {1: 0, 2: 0, 3: 149, 4: 0, 5: 149}
        for session, prompt in ((2, PROMPT), (4, other)):
            assert by_table(prompt).differs(prompt, rows_of(events.take_all(PromptPiece, session))) < EXACT
        for session, prompt in ((1, PROMPT), (2, PROMPT), (3, PROMPT), (4, other), (5, other)):
            assert (await verdict_of(events, first_round(session, prompt))).token_ids == (next_token(prompt),)


async def test_a_cached_prefix_is_not_waited_for_while_a_report_computes_it_again(
    engine: RecordingEngine, target: Events
) -> None:
    await target.open(target_open(1, PROMPT))
    await engine.hold(target, target_open(2, PROMPT, prompt_logprobs=TOP))
    await target.handled(target_open(3, PROMPT))
    engine.go.set()
    await target.of(TargetOpened, 3)
    assert not target.has(TargetOpened, 2), "it was ready before the report was"
    await target.of(TargetOpened, 2)


async def test_rows_with_logits_are_bounded_and_leave_room_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary so large that 20 rows have logits in a step: chunks of reports are cut, other prompts aren't."""
    monkeypatch.setattr(scheduler, "prompt_logit_rows", lambda vocab_size: 20)
    engine = RecordingEngine()
    other = tuple(reversed(PROMPT))
    async with linked_target(engine, prefill_chunk=96) as events:
        events.send(target_open(9, (1, 2, 3)))
        await verdict_of(events, first_round(9, (1, 2, 3)))
        done = len(engine.plans)
        reports = (target_open(session, prompt, prompt_logprobs=TOP) for session, prompt in ((1, PROMPT), (2, other)))
        await engine.hold(events, *reports, target_open(3, (7, *PROMPT)))
        await events.handled()
        engine.go.set()
        for session, prompt in ((1, PROMPT), (2, other)):
            await events.of(TargetOpened, session)
            assert by_table(prompt).differs(prompt, rows_of(events.take_all(PromptPiece, session))) < EXACT
    rows = [logit_rows(plan) for plan in engine.plans[done:]]
    assert max(rows) == 20
    assert sum(rows) == 2 * 149
    assert max(plan.rows for plan in engine.plans) <= 96
    first = [item for plan in engine.plans[: done + 5] for item in plan.items]
    assert max(item.base_length + len(item.token_ids) for item in first) == 150, "the other prompt is done"
    assert len(rows) <= 2 * 149 // 20 + 4, "nobody starves"


def test_the_bound_is_bytes_of_logits() -> None:
    assert prompt_logit_rows(151_936) >= 64
    assert prompt_logit_rows(49_152) >= EngineSettings().prefill_chunk
    assert prompt_logit_rows(151_936) * 151_936 <= PROMPT_LOGITS
    assert prompt_logit_rows(1 << 40) == 1


async def test_rows_that_hold_nan_fail_their_session_alone() -> None:
    class SpoiledEngine(RecordingEngine):
        """Has no number in the logits of rows that carry token 31."""

        def step(self, plan: StepPlan) -> Sequence[Logits]:
            outputs = [np.array(output) for output in super().step(plan)]
            for item, output in zip(plan.items, outputs, strict=True):
                spoiled = [at for at, row in enumerate(item.logit_rows) if item.token_ids[row] == 31]
                output[spoiled] = np.nan
            return outputs

    async with linked_target(SpoiledEngine()) as events:
        events.send(target_open(1, (1, 31, 2, 3), prompt_logprobs=0))
        fine = await report_of(events, 2, (1, 2, 3))
        assert by_table((1, 2, 3)).differs((1, 2, 3), fine) < EXACT
        failure = await events.of(Failure, 1)
        assert failure.session_closed
        assert "largest logit" in failure.message


def test_what_can_not_be_asked() -> None:
    with pytest.raises(InvalidInput, match=r"prompt_logprobs = 21: must be in \[0, 20\]"):
        target_open(1, (1, 2, 3), prompt_logprobs=21)
    with pytest.raises(InvalidInput, match=r"prompt_logprobs_known = 3: must be in \[0, 2\]"):
        target_open(1, (1, 2, 3), prompt_logprobs=1, prompt_logprobs_known=3)


# Mutants: wrong in a way that an engine could easily be, and caught by what the tests above compare.


def of_the_token_itself(
    session_id: int, item: StepItem, token_ids: Sequence[int], logits: Logits, top: int
) -> tuple[PromptPiece, ...]:
    """Off by one: a row is taken for the distribution of its own token."""
    if not len(logits):
        return ()
    first = item.base_length + item.logit_rows[0] + 1
    rows = [token_logprobs(row, token_ids[at - 1], top) for at, row in enumerate(logits, start=first)]
    return (PromptPiece(session_id, first, tuple(rows)),)


def behind_the_cache(self: ReportedRows, rows: int) -> int:
    """Rows that are cached are taken, and nothing is told of them."""
    return rows


def one_row_late(self: ReportedRows, first: int, rows: int) -> range:
    """The first row of each chunk is left out, as that of a round's root would be."""
    reported_rows = within(self, first, rows)
    return range(reported_rows.start + 1, reported_rows.stop)


within = ReportedRows.within


@pytest.mark.parametrize(
    ("place", "mutant"),
    [
        ((step, "prompt_pieces"), of_the_token_itself),
        ((ReportedRows, "reusable"), behind_the_cache),
        ((ReportedRows, "within"), one_row_late),
    ],
    ids=["off by one", "rows of a cached prefix", "chunks without their first row"],
)
async def test_a_mutant_is_given_away(
    place: tuple[Any, str], mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, target: Events
) -> None:
    monkeypatch.setattr(*place, mutant)
    await target.open(target_open(1, PROMPT[:100]))
    pieces, _ = await reported(target, target_open(2, PROMPT, prompt_logprobs=TOP))
    whole = [row for piece in pieces for row in piece.rows]
    right = by_table(PROMPT).differs(PROMPT, whole) < EXACT and len(whole) == len(PROMPT) - 1
    assert not right
