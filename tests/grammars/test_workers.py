"""Grammar workers as real processes: the masks that they find, and every way in which one is ended."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest

from paceline.grammars.pool import LONG_COMPILE_S
from paceline.grammars.sessions import BlockingFollower, Grammars, GrammarSession
from paceline.grammars.wire import Frame, FrameReader, encode_frame
from paceline.models.tokenizer import Tokenizer
from paceline.protocol.errors import (
    DeadlineExceeded,
    InvalidInput,
    Overloaded,
    PeerUnavailable,
    UnknownSession,
    Unsupported,
)
from paceline.protocol.sampling import Grammar, GrammarKind
from paceline.runtime.config import GrammarSettings
from paceline.sampling.grammar import Walk
from tests.grammars.hostile import HOSTILE
from tests.grammars.processes import hosts, workers
from tests.sampling.random_schemas import BYTES, END, TABLE, ids_of
from tests.sampling.test_grammar import SCHEMA, regex

WAIT_S = 20.0
LIMITED = ("multiple", "options")
"""One of time and one of memory."""
TIGHT = GrammarSettings(compile_ms=700, memory_bytes=1 << 26)


def without_end(number: int) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, f'{{"type":"integer","multipleOf":{5_000_011 + 2 * number}}}')


@contextmanager
def grammars(settings: GrammarSettings = TIGHT, load: Callable[[], Tokenizer] = lambda: BYTES) -> Iterator[Grammars]:
    made = Grammars(load, settings)
    try:
        yield made
    finally:
        made.close()
        eventually(lambda: not hosts(), "the host has ended")


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {WAIT_S:g} s: {what}"
        time.sleep(0.005)


def opened(followed: Grammars, grammar: Grammar, prompt_length: int = 0) -> GrammarSession:
    session = followed.open(grammar, (END,), prompt_length)
    session.compilation.result(WAIT_S)
    return session


def drafted(rng: random.Random, walk: Walk) -> list[list[int]]:
    """Paths of a tree: mostly what may come, now and then a token that may not."""
    paths: list[list[int]] = [[]]
    for _ in range(rng.randrange(8)):
        path = rng.choice(paths)
        (mask,) = walk.masks([path])
        likely = ids_of(mask) if mask is not None and rng.random() < 0.8 else range(END)
        paths.append([*path, rng.choice([each for each in likely if each != END] or [0])])
    return paths


SCHEMAS = [
    Grammar(GrammarKind.JSON_SCHEMA, text)
    for text in (json.dumps(SCHEMA), '{"type":"array","items":{"type":"number"}}')
]


class StaysOnThePath(Walk):
    """A mutant: what was drafted last counts as committed."""

    def masks(self, paths: Sequence[Sequence[int]]) -> list[bytes | None]:
        masks = super().masks(paths)
        for token in paths[-1]:
            self._matcher.push(token)
        return masks


def masks_agree(follower: Walk | BlockingFollower, grammar: Grammar, seed: int) -> bool:
    """Whether someone finds the masks along a text with drafted trees that a walk here finds."""
    rng, walk = random.Random(seed), Walk(TABLE.compile(grammar))
    for _ in range(12):
        paths = drafted(rng, walk)
        expected = walk.masks(paths)
        if follower.masks(paths) != expected:
            return False
        ids = ids_of(expected[0] or b"")
        committed = [rng.choice([each for each in ids if each not in (END, *b" \n\r\t")] or ids)]
        if committed == [END]:
            break
        assert walk.commit(committed) == 1
        follower.commit(committed)
    return True


def test_workers_find_the_masks_that_the_library_finds_here() -> None:
    with grammars() as followed:
        for grammar, seed in product(SCHEMAS, range(6)):
            session = opened(followed, grammar)
            assert masks_agree(BlockingFollower(session, WAIT_S), grammar, seed)
            session.close()
        with pytest.raises(DeadlineExceeded, match="within 0 s"):
            BlockingFollower(opened(followed, regex("(ab)+")), 0).masks([[]])


@pytest.mark.parametrize("grammar", SCHEMAS, ids=["object", "array"])
def test_the_masks_give_a_mutant_away(grammar: Grammar) -> None:
    def agrees(kind: type[Walk], seed: int) -> bool:
        return masks_agree(kind(TABLE.compile(grammar)), grammar, seed)

    assert all(agrees(Walk, seed) for seed in range(6))
    assert not all(agrees(StaysOnThePath, seed) for seed in range(6))


def test_sessions_of_a_grammar_share_its_worker_and_are_apart() -> None:
    loads: list[int] = []

    def load() -> Tokenizer:
        loads.append(1)
        return BYTES

    with grammars(load=load) as followed:
        first, second = opened(followed, regex("ab|cd")), opened(followed, regex("ab|cd"))
        assert len(workers()) == 1
        assert ids_of(first.ask([ord("a")], [[]]).result(WAIT_S)[0] or b"") == [ord("b")]
        assert ids_of(second.ask([], [[]]).result(WAIT_S)[0] or b"") == [ord("a"), ord("c")]
        other = opened(followed, regex("xy"))
        assert len(workers()) == 2
        assert ids_of(other.ask([], [[], [ord("z")]]).result(WAIT_S)[0] or b"") == [ord("x")]
        assert loads == [1]


@pytest.mark.parametrize(
    "name", [each if each in LIMITED else pytest.param(each, marks=pytest.mark.full) for each in HOSTILE]
)
def test_a_hostile_grammar_is_refused_by_its_limit_and_holds_nobody_up(name: str) -> None:
    with grammars() as followed:
        running = opened(followed, regex("(ab)+"))
        started = time.monotonic()
        refused = followed.open(HOSTILE[name], (END,), 0)
        eventually(lambda: len(workers()) == 2, "it is being compiled")
        assert running.ask([], [[]]).result(WAIT_S)[0]
        assert opened(followed, regex("c+d")).ask([], [[]]).result(WAIT_S)[0]
        error = refused.compilation.exception(WAIT_S)
        assert time.monotonic() - started < 10
        assert isinstance(error, InvalidInput)
        assert error.metadata["field"] == HOSTILE[name].kind.value
        assert any(limit in error.message for limit in ("700 ms (grammar.compile_ms)", "67108864 bytes (grammar.mem"))
        eventually(lambda: len(workers()) == 2, "its worker has ended, and no other")
        assert running.ask([ord("a")], [[]]).result(WAIT_S)[0]


def test_a_round_that_takes_too_long_ends_its_session_and_the_others_may_begin_anew() -> None:
    with grammars(GrammarSettings(step_ms=300)) as followed:
        slow, waiting = opened(followed, regex("[a-z]+")), opened(followed, regex("[a-z]+"))
        (killed,) = workers()
        other = opened(followed, regex("(ab)+"))
        failed = slow.ask([], [[ord("a")], [ord("b")]] * 150_000)
        behind = waiting.ask([], [[]])
        error = failed.exception(WAIT_S)
        assert isinstance(error, InvalidInput)
        assert "300 ms (grammar.step_ms)" in error.message
        assert isinstance(behind.exception(WAIT_S), UnknownSession)
        assert isinstance(waiting.ask([], [[]]).exception(WAIT_S), UnknownSession)
        assert other.ask([], [[]]).result(WAIT_S)[0]
        assert opened(followed, regex("[a-z]+")).ask([], [[]]).result(WAIT_S)[0]
        assert killed.pid not in {worker.pid for worker in workers()}


def test_a_session_that_ends_ends_its_compilation() -> None:
    with grammars(GrammarSettings(compile_ms=600_000)) as followed:
        running = opened(followed, regex("(ab)+"))
        first, second = (followed.open(HOSTILE["multiple"], (END,), 0) for _ in range(2))
        eventually(lambda: len(workers()) == 2, "it is being compiled")
        first.close()
        assert not second.compilation.done()
        second.close()
        eventually(lambda: len(workers()) == 1, "its worker has ended")
        assert isinstance(second.compilation.exception(WAIT_S), UnknownSession)
        assert running.ask([], [[]]).result(WAIT_S)[0]


def test_only_so_many_compile_at_once_and_the_others_wait_for_a_place() -> None:
    with grammars(GrammarSettings(compile_ms=600_000, workers=2)) as followed:
        slow = [followed.open(without_end(number), (END,), 0) for number in range(3)]
        eventually(lambda: len(workers()) == 3, "the third takes the place of one that takes long")
        assert opened(followed, regex("xy")).ask([], [[]]).result(WAIT_S)[0], "an ordinary one finds a place"
        slow.append(followed.open(without_end(3), (END,), 0))
        eventually(lambda: len(workers()) == 5, "four take long")
        behind = followed.open(regex("ab"), (END,), 0)
        asked = behind.ask([], [[]])
        with pytest.raises(TimeoutError):
            behind.compilation.result(2 * LONG_COMPILE_S)
        slow[0].close()
        behind.compilation.result(WAIT_S)
        assert asked.result(WAIT_S)[0]


@pytest.mark.parametrize("victim", ["worker", "host"])
def test_a_killed_process_is_replaced(victim: str) -> None:
    with grammars() as followed:
        session = opened(followed, regex("ab"))
        expected = session.ask([ord("a")], [[]]).result(WAIT_S)
        (worker,) = workers()
        (worker if victim == "worker" else hosts()[0]).kill()
        eventually(lambda: not worker.is_running(), "the worker is gone")

        def lost() -> bool:
            return isinstance(session.ask([], [[]]).exception(WAIT_S), UnknownSession)

        eventually(lost, "the session knows")
        again = opened(followed, regex("ab"))
        assert again.ask([ord("a")], [[]]).result(WAIT_S) == expected


def test_what_is_kept_is_bounded_by_bytes() -> None:
    with grammars(GrammarSettings(cache_bytes=1 << 24)) as followed:
        for number in range(8):
            opened(followed, regex(f"ab{number}")).close()
        eventually(lambda: 0 < len(workers()) <= 4, "the oldest have ended")
        kept = {worker.pid for worker in workers()}
        opened(followed, regex("ab7"))
        assert {worker.pid for worker in workers()} == kept, "the latest was kept"


def test_where_sessions_need_more_than_there_is_the_largest_goes() -> None:
    with grammars(GrammarSettings(cache_bytes=1 << 24)) as followed:
        sessions = [followed.open(regex(f"ab{number}"), (END,), 0) for number in range(5)]
        for session in sessions:
            session.compilation.exception(WAIT_S)
        eventually(lambda: len(workers()) <= 4, "one has ended")
        asked = [session.ask([], [[]]).exception(WAIT_S) for session in sessions]
        lost = [error for error in asked if error is not None]
        assert 1 <= len(lost) < len(sessions)
        assert all(isinstance(error, UnknownSession | Overloaded) for error in lost)


def test_what_the_library_or_the_grammar_refuses_is_refused_by_field() -> None:
    with grammars() as followed:
        session = followed.open(regex("(a"), (END,), 0)
        asked = [session.ask([], [[]]) for _ in range(100)]
        with pytest.raises(InvalidInput, match=r"regex = '\(a': must be a grammar that can be followed"):
            session.compilation.result(WAIT_S)
        assert all(isinstance(each.exception(WAIT_S), InvalidInput) for each in asked)
        with pytest.raises(InvalidInput, match=r"end_token_ids = \(7,\): must be \(256,\)"):
            followed.open(regex("a"), (7,), 0).compilation.result(WAIT_S)
        forbidden = opened(followed, regex("ab"), 3).ask([9, 9, 9, ord("a"), ord("x")], [[]])
        with pytest.raises(InvalidInput, match="token at position 4 = 120: must be a token that the regex allows"):
            forbidden.result(WAIT_S)


def test_many_sessions_of_a_grammar_ask_at_once() -> None:
    with grammars() as followed:
        sessions = [followed.open(regex("(ab|cd)+"), (END,), 0) for _ in range(100)]
        asked = [session.ask([b"ac"[place % 2]], [[]]) for place, session in enumerate(sessions)]
        for place, each in enumerate(asked):
            assert ids_of(each.result(WAIT_S)[0] or b"") == [b"bd"[place % 2]]
        assert len(workers()) == 1


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "llguidance.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    with grammars() as followed, pytest.raises(Unsupported, match=r"paceline\[grammar\]"):
        opened(followed, regex("a"))


def test_a_host_that_does_not_start_fails_its_grammars_and_the_next_one_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with grammars() as followed:
        with monkeypatch.context() as broken:
            broken.setenv("PYTHONHOME", "/nowhere")
            error = followed.open(regex("a"), (END,), 0).compilation.exception(WAIT_S)
            assert isinstance(error, PeerUnavailable)
        assert opened(followed, regex("a"))


SERVICE = """
import time
from paceline.grammars.sessions import Grammars
from paceline.models.tokenizer import TableTokenizer
from tests.grammars.hostile import HOSTILE
grammars = Grammars(lambda: TableTokenizer(260, 256))
grammars.open(HOSTILE["multiple"], (256,), 0)
time.sleep(600)
"""


def test_a_service_that_is_killed_leaves_no_process_behind() -> None:
    service = subprocess.Popen([sys.executable, "-c", SERVICE])
    try:
        eventually(lambda: bool(workers(service.pid)), "it compiles")
        left = [*hosts(service.pid), *workers(service.pid)]
        assert len(left) == 2
    finally:
        service.kill()
        service.wait()
    eventually(lambda: not any(each.is_running() for each in left), "host and worker have ended")


FRAMES: list[Frame] = [({"taken": 3, "reached": [True]}, b"\x00\xff" * 9), ({}, b""), ({"text": "ü\n"}, b"\0")]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_frames_come_out_as_they_went_in_however_they_are_cut(size: int) -> None:
    stream, reader = b"".join(encode_frame(*frame) for frame in FRAMES), FrameReader()
    frames = [frame for at in range(0, len(stream), size) for frame in reader.feed(stream[at : at + size])]
    assert frames == FRAMES
