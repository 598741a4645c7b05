"""Grammars of every hostile shape, all at once: each within its time and memory, typed, and nobody else waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from paceline.grammars.sessions import Grammars
from paceline.grammars.worker_handle import WORKER_BYTES
from paceline.protocol.errors import InvalidInput, PacelineError, Unsupported
from paceline.protocol.sampling import Grammar, GrammarKind
from paceline.runtime.config import GrammarSettings
from tests.grammars.processes import workers
from tests.grammars.shapes import SHAPES, TOO_DEEP
from tests.grammars.test_workers import eventually, grammars, opened
from tests.sampling.random_schemas import END, ids_of
from tests.sampling.test_grammar import regex

MEMORY = 1 << 26
LIMITS = GrammarSettings(compile_ms=400, step_ms=300, memory_bytes=MEMORY, workers=2)
SERVICE_BYTES = 48 << 20
"""What the service's own process may grow by: it holds no grammar, only its masks."""
SHARED_BYTES = 96 << 20
"""What a worker shows as resident though it shares it with its host: the interpreter and the table."""
TURNS = len(SHAPES) / (2 * LIMITS.workers) + 1
BUDGET_S = TURNS * (LIMITS.compile_ms + LIMITS.step_ms) / 1e3 + 5.0
"""All of them one behind the other at the places that there are, each to its limits."""
STEPS = 4


def followed(pool: Grammars, grammar: Grammar) -> str:
    """What becomes of a grammar that somebody follows for some steps."""
    session = pool.open(grammar, (END,), 0)
    try:
        session.compilation.result(BUDGET_S)
        committed: list[int] = []
        for _ in range(STEPS):
            (mask,) = session.ask(committed, [[]]).result(BUDGET_S)
            allowed = [each for each in ids_of(mask or b"") if each != END]
            if not allowed:
                break
            committed = [allowed[0]]
    except PacelineError as error:
        assert isinstance(error, InvalidInput | Unsupported), error
        return error.message
    finally:
        session.close()
    return "followed"


@contextmanager
def largest_worker() -> Iterator[list[int]]:
    """Resident bytes of the largest worker meanwhile, as the system shows them."""
    seen, over = [0], threading.Event()

    def look() -> None:
        while not over.wait(0.01):
            for worker in workers():
                try:
                    seen[0] = max(seen[0], worker.memory_info().rss)
                except psutil.NoSuchProcess:
                    continue

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield seen
    finally:
        over.set()
        looking.join()


def test_grammars_of_every_hostile_shape_end_within_their_limits() -> None:
    became: dict[str, str] = {}

    def follow(name: str) -> None:
        became[name] = followed(pool, SHAPES[name])

    with grammars(LIMITS) as pool:
        opened(pool, regex("ab"))
        before, began = psutil.Process().memory_info().rss, time.monotonic()
        with largest_worker() as seen:
            asked = [threading.Thread(target=follow, args=(name,)) for name in SHAPES]
            for thread in asked:
                thread.start()
            assert followed(pool, regex("c+d")) == "followed", "an ordinary one beside them"
            for thread in asked:
                thread.join(BUDGET_S)
        assert became.keys() == SHAPES.keys(), f"within {BUDGET_S:.0f} s: {SHAPES.keys() - became.keys()}"
        assert time.monotonic() - began < BUDGET_S
        assert psutil.Process().memory_info().rss - before < SERVICE_BYTES
        assert seen[0] < MEMORY + WORKER_BYTES + SHARED_BYTES, "the system bounds each worker"
        assert followed(pool, regex("e+f")) == "followed", "an ordinary one behind them"
        eventually(lambda: len(workers()) <= len(became) + 3, "no worker is left that nobody follows")
    refused = {name: said for name, said in became.items() if said != "followed"}
    limited = [name for name, said in refused.items() if "grammar." in said]
    assert limited, "some pass a limit of ours"
    assert all(SHAPES[name].kind.value in said for name, said in refused.items()), refused
    assert {"look around", "unknown rule", "wrong kinds"} <= refused.keys(), "the library refuses these at once"


def test_a_schema_that_nothing_can_parse_is_refused_when_it_is_read() -> None:
    with pytest.raises(InvalidInput, match="json_schema"):
        Grammar(GrammarKind.JSON_SCHEMA, TOO_DEEP)


@pytest.mark.parametrize("kind", [*GrammarKind])
def test_a_text_beyond_the_protocols_bound_is_refused_when_it_is_read(kind: GrammarKind) -> None:
    with pytest.raises(InvalidInput, match=f"{kind.value} bytes = 65537"):
        Grammar(kind, "a" * ((1 << 16) + 1))


def test_mutant_without_limits_a_shape_takes_more() -> None:
    """What the test of all shapes would see if compiling were not bounded."""
    loose = GrammarSettings(compile_ms=20_000, memory_bytes=1 << 30)
    slow = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"integer","multipleOf":5000011}')
    with grammars(loose) as pool:
        began = time.monotonic()
        session = pool.open(slow, (END,), 0)
        while not session.compilation.done() and time.monotonic() - began < LIMITS.compile_ms / 1e3 + 0.3:
            time.sleep(0.01)
        assert not session.compilation.done(), f"it takes more than {LIMITS.compile_ms} ms"
        session.close()
