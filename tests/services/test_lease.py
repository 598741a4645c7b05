"""Rounds that the target starts by itself: the text that the coordinator would have had, and where a run ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from paceline.engine.executor import Executor
from paceline.engine.interface import Logits, StepItem, StepPlan
from paceline.grammars.sessions import Grammars
from paceline.models.table_names import TableSpec
from paceline.models.tokenizer import TableTokenizer
from paceline.protocol.proposal import ROOT, Acceptance
from paceline.protocol.sampling import Grammar, GrammarKind, NoiseKey, SamplingParams
from paceline.protocol.session import Close, Failure
from paceline.protocol.target import MAX_LEASE, Round, TargetOpened, Verdict
from paceline.v1 import target_service_pb2 as pb
from tests.services.expected import own_tokens
from tests.services.harness import (
    WAIT_S,
    Events,
    RecordingEngine,
    chain,
    eventually,
    first_round,
    linked_target,
    target_open,
    verdict_of,
)

PREFIX = (1, 2, 3, 4, 5)
OWN = own_tokens(PREFIX, 120)
END = 31
SPEC = TableSpec(vocab=32, seed=3, max_length=256, eos=END)
LENGTH = 24


class PacedEngine(RecordingEngine):
    """Takes as many steps as it is let."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._steps = threading.Semaphore(steps)

    def let(self, steps: int) -> None:
        self._steps.release(steps)

    def step(self, plan: StepPlan) -> Sequence[Logits]:
        assert self._steps.acquire(timeout=WAIT_S), "the test lets the step go on"
        return super().step(plan)


def sent(text: Sequence[int], lease: int = 0, session: int = 1) -> Round:
    return Round(session, len(text) - 1, ROOT, (text[-1],), lease=lease)


async def run_of(events: Events, text: Sequence[int], rounds: int, session: int = 1) -> list[Verdict]:
    """The verdicts of a run, each checked to answer the round behind the one before."""
    verdicts = []
    for number in range(rounds):
        verdict = await events.of(Verdict, session)
        assert verdict.base_length == len(text) - 1 + number
        verdicts.append(verdict)
    return verdicts


def drawn(verdicts: Sequence[Verdict]) -> list[int]:
    return [verdict.token_ids[-1] for verdict in verdicts]


def rounds_of(engine: RecordingEngine, session: int) -> list[StepItem]:
    """What was computed of a session's rounds."""
    items = [item for plan in engine.plans for item in plan.items]
    return [item for item in items if item.session == session and item.logit_rows]


SAMPLINGS = {
    "greedy": SamplingParams(temperature=0),
    "sampled": SamplingParams(temperature=0.9, top_p=0.9),
    "penalties": SamplingParams(repetition_penalty=1.5, presence_penalty=0.8, frequency_penalty=0.7, logprobs=2),
    "bad words": SamplingParams(bad_words=((7,), (9, 3), (5, 1)), logit_bias=((7, 3.0), (9, 2.0))),
    "min tokens": SamplingParams(min_tokens=6, logit_bias=((END, 4.0),)),
    "grammar": SamplingParams(grammar=Grammar(GrammarKind.REGEX, "(ab|cd)+e?")),
}


def each_with_some(others: Sequence[Any]) -> list[Any]:
    """Every sampling beside every other parameter; without `make test-full` each beside one of them, in turns."""
    return [
        pytest.param(name, other, marks=() if (row - column) % len(others) == 0 else pytest.mark.full)
        for row, name in enumerate(SAMPLINGS)
        for column, other in enumerate(others)
    ]


@pytest.mark.parametrize(("name", "acceptance"), each_with_some(list(Acceptance)))
async def test_a_run_draws_what_sent_rounds_draw(name: str, acceptance: Acceptance) -> None:
    facts = {"sampling": SAMPLINGS[name], "acceptance": acceptance, "end_token_ids": (END,), "max_length": LENGTH}
    grammars = Grammars(lambda: TableTokenizer(32, END))
    async with linked_target(RecordingEngine(SPEC), grammars=grammars) as events:
        events.send(target_open(1, PREFIX, **facts))
        one_by_one: list[Verdict] = []
        text = [*PREFIX]
        while len(text) < LENGTH and text[-1] != END:
            one_by_one.append(await verdict_of(events, sent(text)))
            text += one_by_one[-1].token_ids
        events.send(target_open(2, PREFIX, **facts), sent(PREFIX, MAX_LEASE, session=2))
        run = await run_of(events, PREFIX, len(one_by_one), session=2)
        events.send(Close(2), target_open(3, PREFIX))
        await verdict_of(events, sent(PREFIX, session=3))
        assert not events.has(Verdict), "the run has ended with the text"
    assert drawn(run) == drawn(one_by_one)
    assert [verdict.logprobs for verdict in run] == [verdict.logprobs for verdict in one_by_one]
    if name in ("min tokens", "grammar"):
        assert text[-1] == END, "the text ends inside the run"


async def test_a_run_ends_where_its_lease_does_and_a_proposal_goes_on_behind_it(target: Events) -> None:
    target.send(target_open(1, PREFIX), sent(PREFIX, 3))
    text = [*PREFIX, *drawn(await run_of(target, PREFIX, 4))]
    behind = replace(sent(text), proposal=chain(OWN[4:7]))
    text += (await verdict_of(target, behind)).token_ids
    text += (await verdict_of(target, replace(sent(text), accepted_node=2))).token_ids
    assert text[len(PREFIX) :] == OWN[:9]


async def test_a_run_goes_on_longer_when_its_round_is_sent(engine: RecordingEngine, target: Events) -> None:
    """Sent while the target computes it, or a moment after: then its verdict comes twice."""
    tokens: list[int] = []
    target.send(target_open(1, PREFIX), sent(PREFIX, 2))
    while len(tokens) < 30:
        verdict = await target.of(Verdict, 1)
        place = verdict.base_length - len(PREFIX) + 1
        if place == len(tokens):
            tokens += verdict.token_ids
            target.send(sent([*PREFIX, *OWN[: len(tokens)]], 2))
        assert verdict.token_ids == (tokens[place],)
    assert not target.has(Failure)
    assert tokens == OWN[:30]
    bases = [item.base_length for item in rounds_of(engine, 1)[1:]]
    assert bases == list(range(len(PREFIX), len(PREFIX) + len(bases))), "no round is computed twice"


async def test_a_repeated_round_of_a_run_is_answered_without_a_step(engine: RecordingEngine, target: Events) -> None:
    target.send(target_open(1, PREFIX), sent(PREFIX, 3))
    run = await run_of(target, PREFIX, 4)
    steps = len(engine.plans)
    text = [*PREFIX, *drawn(run)]
    for place in range(4):
        assert await verdict_of(target, sent(text[: len(PREFIX) + place])) == run[place]
    assert len(engine.plans) == steps
    failure = await target.answer(sent(PREFIX), Failure)
    assert failure.reason == "PREFIX_MISMATCH", "later rounds of the run were sent since"
    assert await verdict_of(target, sent(text[:-1], 2)) == run[3]
    later = await run_of(target, text, 2)
    assert drawn([*run, *later]) == OWN[:6], "a run that had ended goes on"


async def test_a_round_repeated_in_its_step_is_answered_once(engine: RecordingEngine, target: Events) -> None:
    target.send(target_open(1, PREFIX), sent(PREFIX, 2))
    text = [*PREFIX, *drawn(await run_of(target, PREFIX, 3))]
    await engine.hold(target, sent(text, 1))
    target.send(sent(text, 1))
    wrong = [*text[:-1], (text[-1] + 1) % 32]
    await target.expect_failure(sent(wrong, 1), "PREFIX_MISMATCH", closed=False)
    engine.go.set()
    run = await run_of(target, text, 2)
    await verdict_of(target, sent([*text, *drawn(run)]))
    assert drawn(run) == OWN[3:5]


@pytest.mark.parametrize(
    ("changes", "rounds"),
    [
        ({"max_length": len(PREFIX) + 3}, 3),
        ({"sampling": SamplingParams(logit_bias=((END, 100.0),)), "end_token_ids": (END,)}, 1),
        ({"sampling": SamplingParams(min_tokens=2, logit_bias=((END, 100.0),)), "end_token_ids": (END,)}, 3),
        ({"sampling": SamplingParams(logit_bias=((END, 100.0),)), "max_length": len(PREFIX) + 4}, 4),
    ],
    ids=["max_length", "end token", "end token behind min_tokens", "no end token"],
)
async def test_a_run_ends_early(changes: dict[str, Any], rounds: int) -> None:
    engine = RecordingEngine(SPEC)
    async with linked_target(engine) as events:
        events.send(target_open(1, PREFIX, **changes))
        text = [*PREFIX]
        while len(text) < len(PREFIX) + rounds:
            events.send(sent(text, MAX_LEASE))
            left = len(PREFIX) + rounds - len(text)
            text += drawn(await run_of(events, text, min(MAX_LEASE + 1, left)))
        events.send(target_open(2, PREFIX))
        await verdict_of(events, first_round(2, PREFIX))
        assert events.servicer.status().queue_length == 0
        assert not events.has(Verdict)
    assert len(rounds_of(engine, 1)) == rounds


async def test_a_run_ends_with_what_the_kv_budget_holds_of_the_context() -> None:
    spec = TableSpec(vocab=32, seed=3, max_length=64, max_kv_rows=20)
    async with linked_target(RecordingEngine(spec)) as events:
        events.send(target_open(1, PREFIX), sent(PREFIX, MAX_LEASE))
        run = await run_of(events, PREFIX, 20 - len(PREFIX))
        await eventually(lambda: events.servicer.status().queue_length == 0, "nothing is left to verify")
        assert await verdict_of(events, sent([*PREFIX, *drawn(run)[:-1]])) == run[-1]
        assert not events.has(Verdict)
        assert not events.has(Failure)
        assert events.servicer.status().sessions == 1
    assert drawn(run) == OWN[: len(run)]


async def test_a_run_needs_nothing_of_the_loop(monkeypatch: pytest.MonkeyPatch, target: Events) -> None:
    """Its steps follow each other on the engine's thread: the way to the loop and back costs time in each."""
    calls: list[str] = []
    run = Executor.run

    async def counted(self: Executor, fn: Callable[..., Any], *args: Any) -> Any:
        calls.append(fn.__name__)
        return await run(self, fn, *args)

    await target.open(target_open(1, PREFIX))
    monkeypatch.setattr(Executor, "run", counted)
    target.send(sent(PREFIX, 11))
    verdicts = await run_of(target, PREFIX, 12)
    assert drawn(verdicts) == OWN[:12]
    assert calls.count("_go_on") == 1


async def test_a_service_that_stops_ends_its_runs_with_the_step_that_runs() -> None:
    engine = PacedEngine(steps=4)
    async with linked_target(engine) as events:
        events.send(target_open(1, PREFIX), sent(PREFIX, MAX_LEASE))
        await run_of(events, PREFIX, 3)
        await events.servicer.close()
        events.servicer.runner = asyncio.create_task(asyncio.sleep(WAIT_S))  # what the harness will close
        engine.let(100)
        await asyncio.to_thread(events.servicer.scheduler._executor.close)
        assert len(rounds_of(engine, 1)) <= 5


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"lease": 65}, "lease = 65: must be in [0, 64]"),
        (
            {"lease": 1, "proposal": {"proposal_id": 1, "token_ids": [1], "draft_probabilities": [1.0]}},
            "lease = 1: must be 0",
        ),
    ],
)
async def test_a_malformed_run_is_refused_and_harms_none(changes: dict[str, Any], text: str, target: Events) -> None:
    await target.open(*(target_open(session, PREFIX) for session in (1, 2)))
    message = pb.Round(session_id=1, base_length=4, accepted_node=-1, committed=[5], **changes)
    raw(target, pb.TargetCommand(round=message))
    failure = await target.of(Failure, 1)
    assert (failure.reason, failure.session_closed) == ("INVALID_INPUT", False)
    assert text in failure.message
    assert target.servicer.status().sessions == 2
    for session in (1, 2):
        await verdict_of(target, first_round(session, PREFIX))


def raw(events: Events, message: pb.TargetCommand) -> None:
    """Send what the domain's own objects refuse to be."""

    class Encoded:
        session_id = message.round.session_id

    writer = events.link._writer
    assert writer is not None
    encode, writer._encode = writer._encode, lambda _: message
    writer.send(Encoded())
    writer._encode = encode


async def test_leased_sessions_and_sent_ones_share_steps(engine: RecordingEngine, target: Events) -> None:
    rounds = 12
    await target.open(*(target_open(session, PREFIX, noise=NoiseKey(session)) for session in range(1, 5)))
    engine.plans.clear()
    target.send(*(sent(PREFIX, rounds - 1, session) for session in (1, 2, 3)), urgent=True)
    text = [*PREFIX]
    for _ in range(rounds):
        text += (await verdict_of(target, sent(text, session=4))).token_ids
    runs = {session: await run_of(target, PREFIX, rounds, session) for session in (1, 2, 3)}
    for session, run in runs.items():
        assert drawn(run) == own_tokens(PREFIX, rounds, NoiseKey(session))
    assert text[len(PREFIX) :] == own_tokens(PREFIX, rounds, NoiseKey(4))
    together = [len(plan.items) for plan in engine.plans]
    assert together.count(1) <= rounds, "runs share every step"
    assert len(together) <= 2 * rounds


async def test_a_run_and_a_long_prompt_go_on_together() -> None:
    engine = RecordingEngine()
    long = tuple(i % 32 for i in range(200))
    async with linked_target(engine, prefill_chunk=8) as events:
        await events.open(target_open(1, PREFIX))
        engine.go.clear()
        engine.plans.clear()
        events.send(sent(PREFIX, 40), target_open(2, long))
        engine.go.set()
        run = await run_of(events, PREFIX, 41)
        await events.of(TargetOpened, 2)
    assert drawn(run) == OWN[:41]
    both = [plan for plan in engine.plans if len(plan.items) == 2]
    assert len(both) >= 24, "each chunk shares its step with a round"
    assert all(sum(len(item.token_ids) for item in plan.items) <= 8 + 1 for plan in engine.plans)
