"""A prompt's log-probabilities over real links: those of a direct computation, whatever is cached, shared or cut."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.engine.cpu.row_products import has_wide_vectors
from paceline.engine.decoder import build_engine
from paceline.engine.interface import Engine, Logits, StepItem, StepPlan
from paceline.engine.loading import load_engine
from paceline.engine.prompt_rows import PROMPT_LOGITS, prompt_logit_rows
from paceline.models.resolve import resolve
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
    linked,
    target_link,
    target_open,
    target_service,
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
    events.link.send(Close(session))
    return rows_of(pieces, opening.prompt_logprobs_known)


def logits_wanted(engine: RecordingEngine) -> list[int]:
    """Rows with logits before the last of `PROMPT`, step by step."""
    end = len(PROMPT) - 1
    return [
        sum(item.base_length + row < end for item in plan.items for row in item.logit_rows) for plan in engine.plans
    ]


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
    made = build_engine(model, TableTokenizer(tiny.VOCAB, None), settings, "tiny", static=kind == "static" or None)
    return made, direct, prompt


WIDE = pytest.mark.skipif(not has_wide_vectors(), reason="this CPU has no vectors of 512 bits")


@pytest.mark.parametrize(
    "kind",
    ["plain", "reproducible", "static", pytest.param("compiled", marks=WIDE), pytest.param("int8", marks=WIDE)],
)
async def test_every_engine_reports_what_transformers_computes(kind: str) -> None:
    engine, direct, prompt = torch_engine(kind)
    reproducible = kind == "reproducible"
    async with (
        target_service(engine, prefill_chunk=48, reproducible=reproducible) as (_, address),
        linked(target_link(address)) as events,
    ):
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


@pytest.mark.full
@pytest.mark.real_model
async def test_the_real_model_reports_what_transformers_computes() -> None:
    """SmolLM2's 49,152 ids, 400 tokens; float32's rounding over other numbers of rows moves values by 1e-4 or so."""
    found = resolve("smollm2-135m")
    model = AutoModelForCausalLM.from_pretrained(found.location, dtype=torch.float32, attn_implementation="eager")
    prompt = tuple(random.Random(4).choices(range(2000, 40000), k=100)) * 4
    direct = by_transformers(model, prompt, 49_152)
    async with (
        target_service(load_engine("smollm2-135m", EngineSettings(threads=2)), prefill_chunk=128) as (_, address),
        linked(target_link(address)) as events,
    ):
        for session, known in ((1, 0), (2, 0), (3, 131)):
            rows = await report_of(events, session, prompt, prompt_logprobs=20, prompt_logprobs_known=known)
            assert len(rows) == len(prompt) - 1 - known
            assert direct.differs(prompt, rows, known + 1) < 2e-3


async def test_a_report_comes_in_order_before_anything_else_and_in_bounded_pieces() -> None:
    prompt = tuple(random.Random(7).choices(range(32), k=700))
    engine = RecordingEngine(TableSpec(vocab=32, seed=3, max_length=1024))
    async with (
        target_service(engine, prefill_chunk=600) as (_, address),
        linked(target_link(address)) as events,
    ):
        events.link.send(target_open(1, prompt, prompt_logprobs=20))
        events.link.send(first_round(1, prompt, chain([1, 2, 3])))
        verdict = await events.of(Verdict, 1)
        assert events.has(TargetOpened, 1), "it came before the verdict"
        pieces = [await events.of(PromptPiece, 1) for _ in range(4)]
        assert not events.has(PromptPiece)
    rows = rows_of(pieces)
    assert [len(piece.rows) for piece in pieces] == [256, 256, 64, 123], "chunks end at blocks"
    assert max(len(piece.rows) for piece in pieces) <= MAX_PIECE_ROWS
    assert by_table(prompt).differs(prompt, rows) < EXACT
    assert all(len(row.token_ids) == 21 for row in rows)
    assert verdict.token_ids[0] == next_token(prompt)
    assert engine.plans[-1].items[0].logit_rows == (0, 1, 2, 3), "the round has logits of its own alone"


@pytest.mark.parametrize("top", [0, 20])
async def test_short_prompts_and_resumed_ones(top: int) -> None:
    async with target_service(RecordingEngine()) as (_, address), linked(target_link(address)) as events:
        assert await report_of(events, 1, (5,), prompt_logprobs=top) == []
        rows = await report_of(events, 2, (5, 9), prompt_logprobs=top)
        assert by_table((5, 9)).differs((5, 9), rows) < EXACT
        assert [len(row.token_ids) for row in rows] == [1 + top]
        resumed = await report_of(events, 3, PROMPT, prompt_length=60, prompt_logprobs=top)
        assert len(resumed) == 59, "of the prompt, not of the output"
        assert by_table(PROMPT).differs(PROMPT, resumed) < EXACT
        round_ = first_round(4, PROMPT)
        events.link.send(target_open(4, PROMPT, prompt_length=60, prompt_logprobs=top))
        assert (await verdict_of(events, round_)).token_ids == (next_token(PROMPT),)


async def test_cached_rows_are_computed_again_and_others_share_them() -> None:
    engine = RecordingEngine()
    async with target_service(engine, prefill_chunk=64) as (_, address), linked(target_link(address)) as events:
        pieces, opened = await reported(events, target_open(1, PROMPT, prompt_logprobs=TOP))
        assert opened.reused_tokens == 0
        events.link.send(target_open(2, PROMPT))
        assert (await events.of(TargetOpened, 2)).reused_tokens == len(PROMPT) - 1, "what a report computes is shared"
        cached, again = await reported(events, target_open(3, PROMPT, prompt_logprobs=TOP))
        assert again.reused_tokens == 0
        assert rows_of(cached) == rows_of(pieces)
        behind, opened = await reported(events, target_open(4, PROMPT, prompt_logprobs=TOP, prompt_logprobs_known=70))
        assert opened.reused_tokens == 70, "rows that nothing is asked of are taken"
        assert rows_of(behind, 70) == rows_of(pieces)[70:]
        for session in (1, 2, 3, 4):
            round_ = first_round(session, PROMPT)
            assert (await verdict_of(events, round_)).token_ids == (next_token(PROMPT),)
            events.link.send(Close(session))
        await eventually(lambda: engine.kv_rows == 0, "all rows are free")
    assert sum(logits_wanted(engine)) == 3 * (len(PROMPT) - 1) - 70


async def test_a_report_waits_for_no_leader_and_leads_those_that_do() -> None:
    engine = RecordingEngine()
    async with (
        target_service(engine, prefill_chunk=32) as (servicer, address),
        linked(target_link(address)) as events,
    ):
        engine.go.clear()
        events.link.send(target_open(1, PROMPT))
        await asyncio.to_thread(engine.entered.wait, 10)
        events.link.send(target_open(2, PROMPT, prompt_logprobs=TOP))
        events.link.send(target_open(3, PROMPT))
        other = tuple(reversed(PROMPT))
        events.link.send(target_open(4, other, prompt_logprobs=TOP))
        events.link.send(target_open(5, other))
        await eventually(lambda: servicer.status().sessions == 5, "all have arrived")
        engine.go.set()
        opened = {i: (await events.of(TargetOpened, i)).reused_tokens for i in range(1, 6)}
        assert opened == {1: 0, 2: 0, 3: 149, 4: 0, 5: 149}
        for session, prompt in ((2, PROMPT), (4, other)):
            pieces = []
            while events.has(PromptPiece, session):
                pieces.append(await events.of(PromptPiece, session))
            assert by_table(prompt).differs(prompt, rows_of(pieces)) < EXACT
        for session, prompt in ((1, PROMPT), (2, PROMPT), (3, PROMPT), (4, other), (5, other)):
            assert (await verdict_of(events, first_round(session, prompt))).token_ids == (next_token(prompt),)


async def test_a_cached_prefix_is_not_waited_for_while_a_report_computes_it_again() -> None:
    engine = RecordingEngine()
    async with (
        target_service(engine, prefill_chunk=16) as (servicer, address),
        linked(target_link(address)) as events,
    ):
        events.link.send(target_open(1, PROMPT))
        await events.of(TargetOpened, 1)
        engine.entered.clear()
        engine.go.clear()
        events.link.send(target_open(2, PROMPT, prompt_logprobs=TOP))
        await asyncio.to_thread(engine.entered.wait, 10)
        events.link.send(target_open(3, PROMPT))
        await eventually(lambda: servicer.status().sessions == 3, "both have arrived")
        engine.go.set()
        await events.of(TargetOpened, 3)
        assert not events.has(TargetOpened, 2), "it was ready before the report was"
        await events.of(TargetOpened, 2)


async def test_rows_with_logits_are_bounded_and_leave_room_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary so large that 20 rows have logits in a step: chunks of reports are cut, other prompts aren't."""
    monkeypatch.setattr(scheduler, "prompt_logit_rows", lambda vocab_size: 20)
    engine = RecordingEngine()
    other = tuple(reversed(PROMPT))
    async with (
        target_service(engine, prefill_chunk=96) as (servicer, address),
        linked(target_link(address)) as events,
    ):
        events.link.send(target_open(9, (1, 2, 3)))
        running = first_round(9, (1, 2, 3))
        await verdict_of(events, running)
        engine.go.clear()
        engine.entered.clear()
        done = len(engine.plans)
        for session, prompt in ((1, PROMPT), (2, other)):
            events.link.send(target_open(session, prompt, prompt_logprobs=TOP))
        events.link.send(target_open(3, (7, *PROMPT)))
        await eventually(lambda: servicer.status().sessions == 4, "all have arrived")
        engine.go.set()
        for session, prompt in ((1, PROMPT), (2, other)):
            await events.of(TargetOpened, session)
            pieces = []
            while events.has(PromptPiece, session):
                pieces.append(await events.of(PromptPiece, session))
            assert by_table(prompt).differs(prompt, rows_of(pieces)) < EXACT
    wanted = logits_wanted(engine)[done:]
    assert max(wanted) == 20
    assert sum(wanted) == 2 * 149
    assert max(plan.rows for plan in engine.plans) <= 96
    assert (
        max(item.base_length + len(item.token_ids) for plan in engine.plans[: done + 5] for item in plan.items) == 150
    )
    assert len(wanted) <= 2 * 149 // 20 + 4, "nobody starves"


async def test_running_rounds_are_in_every_step_beside_a_report() -> None:
    engine = RecordingEngine(TableSpec(vocab=32, seed=3, max_length=2048))
    prompt = tuple(random.Random(9).choices(range(32), k=1600))
    async with target_service(engine, prefill_chunk=64) as (_, address), linked(target_link(address)) as events:
        text = [1, 2, 3]
        events.link.send(target_open(1, text, max_length=500))
        verdict = await verdict_of(events, first_round(1, text))
        begun = len(engine.plans)
        events.link.send(target_open(2, prompt, prompt_logprobs=TOP))
        rounds = 0
        round_ = first_round(1, text)
        while not events.has(TargetOpened, 2):
            round_ = round_.following(verdict.token_ids[0])
            verdict = await verdict_of(events, round_)
            rounds += 1
        during = engine.plans[begun:]
        assert max(plan.rows for plan in during) <= 65
        assert rounds >= len(during) // 2 - 2, "a round waited for the chunk that ran, and was in the next step"


def test_the_bound_is_bytes_of_logits() -> None:
    assert prompt_logit_rows(151_936) >= 64
    assert prompt_logit_rows(49_152) >= EngineSettings().prefill_chunk
    assert prompt_logit_rows(151_936) * 151_936 <= PROMPT_LOGITS
    assert prompt_logit_rows(1 << 40) == 1


@pytest.mark.parametrize(("first", "rows", "most"), [(0, 10, 3), (5, 10, 3), (8, 4, 9), (20, 9, 2), (31, 5, 4)])
def test_wanted_rows_of_a_chunk(first: int, rows: int, most: int) -> None:
    wanted = ReportedRows(7, 30, 1)
    by_hand = [row for row in range(first, first + rows) if 7 <= row < 30]
    assert [first + row for row in wanted.within(first, rows)] == by_hand
    cut = wanted.cut(first, rows, most)
    assert [first + row for row in wanted.within(first, cut)] == by_hand[:most]
    assert cut == rows or len(by_hand) > most, "it is cut where it must be"


async def test_rows_that_hold_nan_fail_their_session_alone() -> None:
    class SpoiledEngine(RecordingEngine):
        """Has no number in the logits of rows that carry token 31."""

        def step(self, plan: StepPlan) -> Sequence[Logits]:
            outputs = [np.array(output) for output in super().step(plan)]
            for item, output in zip(plan.items, outputs, strict=True):
                spoiled = [at for at, row in enumerate(item.logit_rows) if item.token_ids[row] == 31]
                output[spoiled] = np.nan
            return outputs

    async with target_service(SpoiledEngine()) as (_, address), linked(target_link(address)) as events:
        opening = target_open(1, (1, 31, 2, 3), prompt_logprobs=0)
        events._events.clear()
        events.link.send(opening)
        fine = await report_of(events, 2, (1, 2, 3))
        assert by_table((1, 2, 3)).differs((1, 2, 3), fine) < EXACT
        failure = next(event for event in events._events if isinstance(event, Failure))
        assert failure.session_id == 1
        assert failure.session_closed
        assert "largest logit" in failure.message


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"prompt_logprobs": 21}, r"prompt_logprobs = 21: must be in \[0, 20\]"),
        ({"prompt_logprobs": 1, "prompt_logprobs_known": 3}, r"prompt_logprobs_known = 3: must be in \[0, 2\]"),
    ],
    ids=["too many alternatives", "more known than there is"],
)
def test_what_can_not_be_asked(asked: dict[str, int], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        target_open(1, (1, 2, 3), **asked)


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
    found = within(self, first, rows)
    return range(found.start + 1, found.stop)


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
    place: tuple[Any, str], mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*place, mutant)
    async with target_service(RecordingEngine()) as (_, address), linked(target_link(address)) as events:
        events.link.send(target_open(1, PROMPT[:100]))
        await events.of(TargetOpened, 1)
        pieces, _ = await reported(events, target_open(2, PROMPT, prompt_logprobs=TOP))
    whole = [row for piece in pieces for row in piece.rows]
    right = by_table(PROMPT).differs(PROMPT, whole) < EXACT and len(whole) == len(PROMPT) - 1
    assert not right
