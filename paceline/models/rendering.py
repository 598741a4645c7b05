"""Limits of chat templates: the time that one may take, and the memory that the process may grow by meanwhile.

A template is a program that comes with a model, and what it does depends on the chat: a loop over messages within a
loop over messages, a text that doubles with each. Jinja's sandbox keeps it from the interpreter, not from endless
work. A watching thread has Python raise `RenderStopped` in the rendering thread; Python does so between two of the
template's operations, so one that takes long or much by itself (`'x' * 10**10`) is stopped behind it, not within.
It is raised where the template runs, not where Python meanwhile collects an object, whoever's it is: such a call
would be cut short, and the exception lost.

Turns of a chat in the shape that chat templates read, and how table models write them.

The variables that a chat template reads beside the chat.
"""

from __future__ import annotations

import ctypes
import json
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from paceline.protocol.errors import InvalidInput

Turn = Mapping[str, Any]
"""A message or a tool as JSON, in the names of OpenAI's chat."""
Scalar = str | bool | int | float | None
"""A value of a variable that a chat template reads."""


def keys_and_strings(value: object) -> tuple[list[str], list[str]]:
    """Every key of objects in a JSON value, and every string that is none; without recursion, whatever the depth."""
    keys, strings, parts = list[str](), list[str](), [value]
    while parts:
        part = parts.pop()
        if isinstance(part, str):
            strings.append(part)
        elif isinstance(part, Mapping):
            keys.extend(part)
            parts.extend(part.values())
        elif isinstance(part, Sequence):
            parts.extend(part)
    return keys, strings


def letter_turns(turns: Sequence[Turn], tools: Sequence[Turn]) -> str:
    """A chat as table models read it: a line a turn; calls of functions as Hermes writes them."""
    tool_lines = "".join(f"tool {json.dumps(tool)}\n" for tool in tools)
    return tool_lines + "".join(f"{turn['role']}: {_turn_text(turn)}\n" for turn in turns)


def _turn_text(turn: Turn) -> str:
    calls = [call["function"] for call in turn.get("tool_calls") or ()]
    call_texts = [json.dumps({"name": call["name"], "arguments": call["arguments"]}) for call in calls]
    content = [turn["content"]] if turn.get("content") else []
    return "\n".join([*content, *(f"<tool_call>\n{call}\n</tool_call>" for call in call_texts)])


MAX_RENDER_MS = 2_000
"""Templates of published models write 4,096 messages within 200 ms on two slow cores; chosen beyond that."""
MAX_RENDER_BYTES = 256 << 20
"""Most bytes that the process may grow by while a chat is rendered: the longest text of a million tokens takes some
10 MB, and each of the template's variables may hold it once. What other threads take meanwhile counts, too."""
LOOK_S = 0.02
"""Seconds between looks at time and memory."""
AGAIN_S = 0.5
"""Seconds after which a rendering that did not stop is stopped again, far longer than it takes to unwind. (The thread
may have moved on between the look at where it runs and the raise, or begun a call of the collector's, where the raise
is lost.)"""
TEMPLATE_FILE = "<template>"
"""Jinja's file name for the code of a template that came from no file."""

Output = TypeVar("Output")


class RenderStopped(BaseException):
    """Raised in the rendering thread alone; no `Exception`, so that a template's own handling lets it pass."""


@dataclass(eq=False)
class _Rendering:
    """A running rendering of a chat; changed under the watch's lock."""

    thread: int
    resident_bytes: int
    began_s: float = math.inf
    """When it began; nothing is raised before."""
    limit: str = ""
    """The limit that it has passed, for which it is being stopped; empty: none."""
    raised_s: float = -math.inf
    is_over: bool = False


@dataclass
class RenderWatch:
    """Stops renderings that take too much time or memory. May be used from any thread.

    Attributes:
        max_ms, max_bytes: of one rendering.
    """

    max_ms: int = MAX_RENDER_MS
    max_bytes: int = MAX_RENDER_BYTES
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    """Not a `Condition`, whose methods are Python: an exception raised in one would leave it locked."""
    _has_renderings: threading.Event = field(default_factory=threading.Event, init=False)
    _running: set[_Rendering] = field(default_factory=set, init=False)
    _watching: bool = field(default=False, init=False)

    def run(self, render: Callable[[], Output]) -> Output:
        """Call `render` on this thread and return what it returns.

        Raises:
            RenderStopped: a limit was passed; it reads after "a chat that the model's template renders".
        """
        rendering = _Rendering(threading.get_ident(), _resident_bytes())
        self._begin(rendering)
        try:
            try:
                rendering.began_s = time.monotonic()
                return render()
            finally:
                self._end(rendering)
        except RenderStopped:
            self._end_at_last(rendering)
            raise RenderStopped(rendering.limit) from None

    def _begin(self, rendering: _Rendering) -> None:
        with self._lock:
            self._running.add(rendering)
            starts, self._watching = not self._watching, True
        self._has_renderings.set()
        if starts:
            threading.Thread(target=self._watch, name="template-watch", daemon=True).start()

    def _end_at_last(self, rendering: _Rendering) -> None:
        while not rendering.is_over:
            with suppress(RenderStopped):
                self._end(rendering)

    def _end(self, rendering: _Rendering) -> None:
        """End a rendering, after which nothing is raised. May itself be stopped: then it is called again."""
        with self._lock:
            if rendering.limit and not rendering.is_over:
                _raise_here()
            rendering.is_over = True
            self._running.discard(rendering)

    def _watch(self) -> None:
        while self._has_renderings.wait():
            time.sleep(LOOK_S)
            with self._lock:
                if not self._running:
                    self._has_renderings.clear()
                self._stop_over_limit()

    def _stop_over_limit(self) -> None:
        now = time.monotonic()
        old = [each for each in self._running if now - each.began_s >= LOOK_S]
        resident_bytes = _resident_bytes() if old else 0
        for each in old:
            each.limit = each.limit or self._passed_limit(now - each.began_s, resident_bytes - each.resident_bytes)
            if each.limit and now - each.raised_s >= AGAIN_S and _runs_template(each.thread):
                each.raised_s = now
                _raise_in(each.thread, RenderStopped)

    def _passed_limit(self, took_s: float, grew_bytes: int) -> str:
        """The limit that a rendering has passed; empty: none."""
        if took_s * 1e3 > self.max_ms:
            return f"within {self.max_ms} ms"
        return f"within {self.max_bytes} bytes" if grew_bytes > self.max_bytes else ""


def _runs_template(thread: int) -> bool:
    """Whether the innermost call of a thread is the template's or Jinja's; one that only begins isn't seen yet."""
    import jinja2

    frame = sys._current_frames().get(thread)
    file = frame.f_code.co_filename if frame else ""
    return file == TEMPLATE_FILE or file.startswith(str(Path(jinja2.__file__).parent))


def _raise_in(thread: int, error: type[BaseException]) -> None:
    """Have a thread raise an exception between two of its operations, in place of one that it has not raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


def _raise_here() -> None:
    """Have what this thread has not raised yet be raised here, where it ends.

    Taking it back (NULL) would leave up CPython's flag that a thread has something to raise, which only a raise
    takes down. Before 3.13 all threads have one flag: each call would stop to look, and on 3.11 a traced one hangs.
    """
    try:
        _raise_in(threading.get_ident(), RenderStopped)
        while True:
            pass
    except RenderStopped:
        return


def _resident_bytes() -> int:
    import psutil  # clients have none, and render nothing

    return int(psutil.Process().memory_info().rss)


_WATCH = RenderWatch()
_REFUSALS = (TypeError, AttributeError, LookupError, ArithmeticError, RecursionError, MemoryError)
"""Errors of templates on chats that they were not written for: values of the wrong kind, their own arithmetic,
macros that call themselves, texts beyond all memory."""


def render_within_limits(turns: Sequence[Turn], render: Callable[[], Output]) -> Output:
    """Render a chat within the limits.

    Raises:
        InvalidInput: the template refuses the chat, or takes too long or too much; it names the limit.
    """
    from jinja2 import TemplateError

    try:
        return _WATCH.run(render)
    except RenderStopped as stop:
        raise _refusal(turns, f"a chat that the model's template renders {stop}") from stop
    except (TemplateError, *_REFUSALS) as error:
        raise refused_by_template(turns, error) from error


def refused_by_template(turns: Sequence[Turn], error: Exception) -> InvalidInput:
    """The error for a chat that a template refuses."""
    return _refusal(turns, f"a chat that the model's template takes ({error})")


def _refusal(turns: Sequence[Turn], limit: str) -> InvalidInput:
    return InvalidInput.of("messages", [turn.get("role") for turn in turns], limit)


_GENERATION_TAGS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""Tags of transformers' own around an answer, which Jinja doesn't know; they read nothing."""
_OURS = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "raise_exception")
)
"""Variables that rendering itself sets, and no request may."""


def template_variables(template: str) -> frozenset[str]:
    """Names that a template reads and a request may set; none, if the template can't be parsed.

    Names of special tokens are not told from others.
    """
    from jinja2 import Environment, TemplateError, meta

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])  # noqa: S701 - it renders nothing
    try:
        tree = environment.parse(_GENERATION_TAGS.sub("", template))
    except TemplateError:
        return frozenset()
    return frozenset(meta.find_undeclared_variables(tree)) - _OURS - environment.globals.keys() - {"strftime_now"}
