"""Log lines: one event is one line, whatever text of a peer is in it.

Incarnations, drafters' names, versions and messages of errors come over the wire. Every service's log passes through
`OneLine` or `JsonLine`, so no place that logs can forget to make them harmless.

A message's template names its facts (`session=%d`), from which `JsonLine` makes fields. Facts that all lines of a
request have in common are stated once, by `speak_of`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from itertools import zip_longest
from typing import Any, Literal

LogFormat = Literal["console", "json"]
_FORMAT = "%(asctime)s %(levelname)s %(name)s {speaker}%(message)s"
MAX_LINE_CHARACTERS = 4096
"""Most characters of one message, of each of its facts, and of each line of a stack."""
MAX_STACK_LINES = 200
TRACEPARENT_PARTS = 4
INDENT = "    "
"""Before each line of a stack: no line of a log but an event's own begins with a time."""
_CONVERSION = re.compile(r"%%|(?:(\w+)=)?%[-+ #0-9.*]*[a-zA-Z]")
_OWN = ("time", "level", "logger", "speaker", "message", "stack")
_subject: ContextVar[Mapping[str, str | int]] = ContextVar("what is logged about", default={})  # noqa: B039 - never changed


def one_line(text: str, limit: int = MAX_LINE_CHARACTERS) -> str:
    """The text with everything escaped that isn't printable, a line's end and a terminal's commands included.

    A text of more than `limit` characters is cut there and ends with the number of those that it lacks.
    """
    excess = len(text) - limit
    line = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text[:limit])
    return f"{line}… ({excess} more characters)" if excess > 0 else line


@contextmanager
def speak_of(**subject: str | int) -> Iterator[None]:
    """Add facts to every line that is logged within the block, or in tasks that are begun there."""
    token = _subject.set({**_subject.get(), **{name: value for name, value in subject.items() if value != ""}})
    try:
        yield
    finally:
        _subject.reset(token)


class OneLine(logging.Formatter):
    """Time, level, logger, the message as `one_line`, the facts of `speak_of`; then the stack, indented.

    `speaker` stands before each message.
    """

    def __init__(self, speaker: str = "") -> None:
        super().__init__(_FORMAT.format(speaker=speaker))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        """The event's line."""
        about = "".join(f" {name}={one_line(str(value))}" for name, value in _subject.get().items())
        record.message = one_line(record.message) + about
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:  # noqa: N802 - logging's own name
        """The stack; an exception's message may hold anything."""
        lines = super().formatException(ei).splitlines()  # type: ignore[arg-type]
        return "\n".join(INDENT + one_line(line) for line in lines)


class JsonLine(logging.Formatter):
    """One JSON object in ASCII: `time` in UTC, `level`, `logger`, `speaker`, `message`, the message's facts, `stack`.

    A fact can't take the place of one of these fields: it is left to the message then.
    """

    def __init__(self, speaker: str = "") -> None:
        super().__init__()
        self._speaker = speaker.strip(": ")

    def format(self, record: logging.LogRecord) -> str:
        """The event's line."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields: dict[str, object] = {"time": time, "level": record.levelname, "logger": record.name}
        if self._speaker:
            fields["speaker"] = self._speaker
        fields["message"] = one_line(record.getMessage())
        facts = {**_subject.get(), **_facts(record)}
        fields |= {name: _plain(value) for name, value in facts.items() if name not in _OWN}
        if record.exc_info:
            stack = self.formatException(record.exc_info).splitlines()[:MAX_STACK_LINES]
            fields["stack"] = [one_line(line) for line in stack]
        return json.dumps(fields)


def trace_of(traceparent: str) -> str:
    """The trace's id in a W3C trace context; empty: it has none."""
    parts = traceparent.split("-")
    return parts[1] if len(parts) == TRACEPARENT_PARTS else ""


def log_to_stderr(speaker: str = "", log_format: LogFormat = "console") -> None:
    """Have this process log to stderr, from INFO on; `speaker` tells processes apart that share it."""
    handler = logging.StreamHandler()
    handler.setFormatter(_formatter(log_format, speaker))
    handler.addFilter(_is_news)
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _is_news(record: logging.LogRecord) -> bool:
    """False for gRPC's error about a caller that left while its call's last status was written.

    Nothing is lost by that: our methods log what they raise.
    """
    return not (record.name == "grpc._cython.cygrpc" and record.getMessage().startswith("ExecuteBatchError raised"))


def use_format(log_format: LogFormat) -> None:
    """Switch this process to the configuration's format; until that is read, lines are for people."""
    for handler in _ours():
        handler.setFormatter(_formatter(log_format, ""))


def format_in_use() -> LogFormat:
    """The format that this process logs in."""
    return "json" if any(isinstance(handler.formatter, JsonLine) for handler in _ours()) else "console"


def _ours() -> list[logging.Handler]:
    return [each for each in logging.getLogger().handlers if isinstance(each.formatter, OneLine | JsonLine)]


def _formatter(log_format: LogFormat, speaker: str) -> logging.Formatter:
    return JsonLine(speaker) if log_format == "json" else OneLine(speaker)


def message_of(line: str) -> str:
    """The console form of a line of either format; the line itself if it is neither."""
    if not line.startswith("{"):
        return line
    try:
        fields = json.loads(line)
        return f"{fields['time']} {fields['level']} {fields['logger']} {fields['message']}"
    except (ValueError, KeyError, TypeError):
        return line


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    """The arguments of a message that its template names."""
    arguments = record.args if isinstance(record.args, tuple) else ()
    names = [match[1] for match in _CONVERSION.finditer(str(record.msg)) if match[0] != "%%"]
    return {name: value for name, value in zip_longest(names, arguments) if name}


def _plain(value: object) -> object:
    """A value that JSON can hold: numbers and truth values as they are, all others as text."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    return one_line(str(value))
