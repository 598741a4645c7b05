"""Chat templates without end, and chats that attack honest ones: stopped by a limit that the error names."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
from jinja2 import Environment

from paceline.models import rendering
from paceline.models.prompts import AT_ONCE_BYTES, PromptReader
from paceline.models.rendering import RenderStopped, RenderWatch
from paceline.models.tokenizer import TransformersTokenizer
from paceline.protocol.errors import InvalidInput
from paceline.protocol.generation import MAX_MESSAGES, ChatMessage, GenerateRequest
from tests.models.saving import templated

HI = ({"role": "user", "content": "hi"},)
MS = 150
LONG_MS = 5_000
"""Of what must be stopped: a watching thread may have to wait for a turn on a busy machine."""
BYTES = 96 << 20
STOPPED_S = 10.0
"""What the slowest single operation, 0.1 s alone, may take beyond the limit on a busy machine; without one: hours."""
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
LOOPS = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
DOUBLES = (
    "{% set ns = namespace(x='0123456789abcdef') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
)
DOUBLES_BY_MESSAGE = DOUBLES.replace("range(60)", "messages")
APPENDS = "{% set c = ns.x %}{% for i in range(9999) %}{% set ns.x = ns.x ~ c %}{% endfor %}"
GROWS = DOUBLES.replace("60", "18") + APPENDS
"""By 4 MiB at a time: a look that comes late finds little more."""
ENDLESS = {
    "loops": LOOPS,
    "loops over messages": "{% for a in messages %}" * 4 + "{% endfor %}" * 4,
    "filters": "{% for a in range(99999) %}{{ range(99999) | list | sort | join | length }}{% endfor %}",
    "macros": "{% macro f(n) %}{% for i in range(9) %}{{ f(n - 1) if n }}{% endfor %}{% endmacro %}{{ f(40) }}",
}
REFUSED = {
    "by zero": "{{ 1 // (messages | length - 1) }}",
    "range": "{% for a in range(10 ** 9) %}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "format": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "import": "{% include '/etc/passwd' %}",
    "attribute": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "changes": "{{ messages.append(1) }}",
    "namespace": "{% set n = namespace(__class__=1) %}",
}

LOST = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""Raised as a callback of Python's collector begins (hypothesis has one), it is lost, shown, and raised again."""


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "_WATCH", RenderWatch(MS, BYTES))


def refusal(template: str, turns: Any = HI) -> InvalidInput:
    with pytest.raises(InvalidInput) as refused:
        templated(template).render_turns(turns)
    return refused.value


@LOST
@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_end_is_stopped(tight: None, name: str) -> None:
    turns = HI * 200
    began = time.monotonic()
    error = refusal(ENDLESS[name], turns)
    assert f"renders within {MS} ms" in error.message
    assert time.monotonic() - began < MS / 1e3 + STOPPED_S
    assert templated(PLAIN).template_text(HI) == "user: hi\n", "nothing is raised behind it"


def passed_a_limit(error: InvalidInput) -> bool:
    return f"renders within {BYTES} bytes" in error.message or f"renders within {MS} ms" in error.message


@LOST
@pytest.mark.parametrize(("template", "messages"), [(DOUBLES, 1), (DOUBLES_BY_MESSAGE, 60)])
def test_a_template_that_doubles_without_end_is_stopped(tight: None, template: str, messages: int) -> None:
    assert passed_a_limit(refusal(template, HI * messages))


def test_what_is_collected_meanwhile_is_not_cut_short() -> None:
    begun, ended = [], []

    class Held:
        def __del__(self) -> None:
            begun.append(1)
            deadline = time.monotonic() + 0.004
            while time.monotonic() < deadline:
                pass
            ended.append(1)

    template = Environment().from_string(
        "{% for i in range(10 ** 9) %}{{ let_go() }}{% for j in range(50000) %}{% endfor %}{% endfor %}"
    )
    watch = RenderWatch(max_ms=40)
    for _ in range(5):
        with pytest.raises(RenderStopped, match="within 40 ms"):
            watch.run(lambda: template.render(let_go=lambda: bool(Held())))
    assert begun == ended


@LOST
def test_a_template_that_grows_without_end_is_stopped(tight: None) -> None:
    process, peak = psutil.Process(), 0
    before, over = process.memory_info().rss, threading.Event()

    def look() -> None:
        nonlocal peak
        while not over.wait(0.005):
            peak = max(peak, process.memory_info().rss)

    looking = threading.Thread(target=look)
    looking.start()
    error = refusal(GROWS)
    over.set()
    looking.join()
    assert passed_a_limit(error)
    assert peak - before < 4 * BYTES


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_template_may_not_is_refused(name: str) -> None:
    assert refusal(REFUSED[name]).metadata["field"] == "messages"


@pytest.mark.parametrize("depth", [64, 900])
def test_a_chat_that_is_nested_deep_is_rendered_or_refused(depth: int) -> None:
    arguments: Any = "x"
    for _ in range(depth):
        arguments = {"a": [arguments]}
    turns = ({"role": "user", "content": "hi", "arguments": arguments},)
    template = "{% for m in messages %}{{ m.arguments | tojson }}{% endfor %}"
    if depth == 64:
        assert json.loads(templated(template).template_text(turns)) == arguments
    else:
        assert refusal(template, turns)


async def test_many_empty_messages_are_rendered_beside_the_event_loop() -> None:
    threads: set[int] = set()

    class Noting(TransformersTokenizer):
        def render_chat(self, messages: Any) -> tuple[int, ...]:
            threads.add(threading.get_ident())
            return (1,)

    reader = PromptReader(templated(PLAIN, Noting))
    many = GenerateRequest(messages=(ChatMessage("user", ""),) * (MAX_MESSAGES - 1) + (ChatMessage("user", "hi"),))
    assert sum(len(message.content) for message in many.messages) < AT_ONCE_BYTES
    await reader.tokenise(many, 4096)
    reader.close()
    assert threads, "it was rendered"
    assert threading.get_ident() not in threads


COUNTS = Environment(extensions=["jinja2.ext.loopcontrols"]).from_string(
    "{% for a in range(10 ** 9) %}{% if now() >= until %}{% break %}{% endif %}{% endfor %}"
)
"""Works until a moment."""


def counting(until: float) -> str:
    return COUNTS.render(now=time.monotonic, until=until)


def test_each_rendering_is_stopped_by_its_own_limit_and_once() -> None:
    """Many at once: those that end in time are never touched, also where they end as they would be stopped."""
    watch, limit_s = RenderWatch(max_ms=60), 0.06

    def one(ms: float) -> tuple[str, float]:
        began, said = time.monotonic(), ""
        until = began + ms / 1e3
        try:
            watch.run(lambda: counting(until))
        except RenderStopped as stopped:
            said = str(stopped)
        took = time.monotonic() - began
        for _ in range(1000):
            time.monotonic()  # where a late exception would be raised
        return said, took

    times = [5, 30, 59, 60, 61, 62, LONG_MS, LONG_MS] * 8
    with ThreadPoolExecutor(8) as threads:
        ends = [*threads.map(one, times)]
    assert {said for said, _ in ends} <= {"", "within 60 ms"}
    assert all(took > limit_s for said, took in ends if said), "none before its time"
    assert all(said for (said, _), ms in zip(ends, times, strict=True) if ms == LONG_MS)


def test_mutant_a_watch_that_sleeps_lets_a_template_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RenderWatch, "_stop_over_limit", lambda self: None)
    watch = RenderWatch(max_ms=20)
    until = time.monotonic() + 0.2
    watch.run(lambda: counting(until))
    assert time.monotonic() >= until, "it ends by itself"


TRACED = """
import sys, time
from jinja2 import Environment
from paceline.models import rendering

endless = Environment().from_string("{{% for a in range(10 ** 9) %}}{{% endfor %}}")
watch = rendering.RenderWatch(max_ms=20)
{mutation}
try:
    watch.run(endless.render)
except rendering.RenderStopped:
    print("stopped", flush=True)
    sys.settrace(lambda frame, event, argument: None)
    watch.run(int)
    print("traced")
"""
TAKEN_BACK = """
import ctypes
rendering._raise_here = lambda: ctypes.pythonapi.PyThreadState_SetAsyncExc(
    ctypes.c_ulong(rendering.threading.get_ident()), None
)
"""


@contextmanager
def traced(mutation: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process that traces its calls once a rendering was stopped, which it has said."""
    command = [sys.executable, "-c", TRACED.format(mutation=mutation)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "stopped\n"
            yield process
        finally:
            process.kill()


def test_a_stopped_rendering_leaves_the_interpreter_as_it_was() -> None:
    with traced() as process:
        assert process.wait(timeout=60.0) == 0
        assert process.stdout is not None
        assert process.stdout.read() == "traced\n"


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="traced calls look at the flag but once")
def test_mutant_an_exception_that_is_taken_back_hangs_a_traced_call() -> None:
    with traced(TAKEN_BACK) as process, pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1.0)
