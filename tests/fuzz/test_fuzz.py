"""A slice of every surface that needs no process of its own, and planted defects that the fuzzer must find."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.protocol.errors import InvalidInput
from paceline.protocol.given_files import read_text
from paceline.rpc.sessions import LinkSessions
from paceline_lab.bench.prompts import questions
from paceline_lab.bench.prompts.questions import load_questions
from target_service.session import Session
from tests.fuzz import files_surface, link_scripts, sessions_surface
from tests.fuzz.cases import FuzzCase, Untyped, fuzz, within
from tests.fuzz.codec_surface import decoded
from tests.fuzz.files_surface import KINDS
from tests.fuzz.link_scripts import DRAFT_LINK, TARGET_LINK
from tests.fuzz.message_mutations import mutated_message, parts_of_messages
from tests.fuzz.odd_values import mutated_bytes
from tests.fuzz.surfaces import SURFACES
from tests.protocol.test_codec import PAIRS
from tests.services.expected import own_tokens

SLICE = {"codec": 3_000, "target": 60, "draft": 60, "files": 200, "folders": 30}
"""Some 3,300 cases in 8 s on two slow cores."""
PROCESSES = {"draft-events": 60, "target-events": 60, "generate": 300, "http": 400}
SEED = 24


@pytest.mark.parametrize("name", [*SLICE, *(pytest.param(name, marks=pytest.mark.full) for name in PROCESSES)])
async def test_mutated_input_meets_typed_errors_alone(name: str) -> None:
    count = (SLICE | PROCESSES)[name]
    tally = await fuzz(SURFACES[name], SEED, range(count))
    assert not tally.findings, [f"{each.what}: {each.case.replay}" for each in tally.findings]
    assert tally.cases == count
    assert len(tally.kinds) >= 2 or name == "draft-events", "cases are refused, but for a draft that lies"


@settings(max_examples=100, deadline=None)
@given(data=st.data(), name=st.sampled_from([*PAIRS]), seed=st.integers(0, 1 << 32))
def test_any_valid_message_may_be_mutated(data: st.DataObject, name: str, seed: int) -> None:
    encode, _, strategy = PAIRS[name]
    rng = random.Random(seed)
    message = mutated_message(rng, encode(data.draw(strategy)), parts_of_messages())
    wire = message.SerializeToString()
    decoded(name, wire if rng.random() < 0.7 else mutated_bytes(rng, wire, wire))


@pytest.mark.parametrize("make", [TARGET_LINK.mutated_script, DRAFT_LINK.mutated_script], ids=["target", "draft"])
def test_a_case_is_the_same_whenever_it_is_made(make: Callable[[random.Random], Any]) -> None:
    case = FuzzCase("target", SEED, 7)
    first = make(case.rng)
    for index in range(20):
        make(FuzzCase("target", SEED, index).rng)
    assert make(case.rng) == first
    assert make(FuzzCase("target", SEED + 1, 7).rng) != first


async def findings(name: str, count: int) -> list[str]:
    tally = await fuzz(SURFACES[name], SEED, range(count), most_findings=1)
    return [each.what for each in tally.findings]


async def test_mutant_a_decoder_that_reads_before_it_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    encode, decode, strategy = PAIRS["target_event"]

    def careless(message: Any) -> Any:
        if message.HasField("verdict"):
            assert message.verdict.token_ids[0] >= 0
        return decode(message)

    monkeypatch.setitem(PAIRS, "target_event", (encode, careless, strategy))
    (finding,) = await findings("codec", 2_000)
    assert "IndexError" in finding


async def target_trips(words: str) -> None:
    async with SURFACES["target"].open(SEED) as target:
        with pytest.raises(Untyped, match=words):
            for index in range(40):
                await target.run(FuzzCase("target", SEED, index))


async def test_mutant_a_link_whose_sessions_live_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_surface, "SETTLED_S", 0.5)
    monkeypatch.setattr(LinkSessions, "on_closed", lambda self: None)
    await target_trips("no session and no row is left")


async def test_mutant_a_session_that_trips_over_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    def trips(self: Session, round_: Any) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(Session, "_check_continues", trips)
    await target_trips("KeyError")


async def test_mutant_a_service_that_says_another_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def next_but_one(prefix: Any, count: int) -> list[int]:
        return [token + 1 for token in own_tokens(prefix, count)]

    monkeypatch.setattr(link_scripts, "own_tokens", next_but_one)
    with pytest.raises(AssertionError, match="the text is the target's own"):
        await findings("draft", 1)


async def test_mutant_a_reader_that_forgets_what_the_library_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(field: str, file: Any) -> Any:
        import json

        for number, line in enumerate(read_text(field, file).split("\n")):
            if line.strip():
                try:
                    yield f"line {number}", json.loads(line)
                except json.JSONDecodeError as error:
                    raise InvalidInput(str(error)) from error

    monkeypatch.setattr(questions, "read_json_lines", careless)
    monkeypatch.setattr(files_surface, "KINDS", [each for each in KINDS if each.read is load_questions])
    for other in ("CHECKPOINTS", "GGUF_FILES"):
        monkeypatch.setattr(files_surface, other, 0)
    tally = await fuzz(SURFACES["files"], SEED, range(2_000), most_findings=1)
    assert [each.what.partition(":")[0] for each in tally.findings] in (["RecursionError"], ["ValueError"])


def test_mutant_a_case_that_takes_long() -> None:
    with pytest.raises(Untyped, match="took"):
        within(0.0, time.thread_time() - 1)
