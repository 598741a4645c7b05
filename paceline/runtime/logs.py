"""Log lines: one event is one line, whatever text of a peer is in it.

Incarnations, drafters' names, versions and messages of errors come over the wire. Every service's log passes through
`OneLine`, so no place that logs can forget to make them harmless.
"""

from __future__ import annotations

import logging

_FORMAT = "%(asctime)s %(levelname)s %(name)s {speaker}%(message)s"
MAX_LINE_CHARACTERS = 4096
"""Of one message, and of each line of a stack."""
INDENT = "    "
"""Before each line of a stack: no line of a log but an event's own begins with a time."""


def one_line(text: str, limit: int = MAX_LINE_CHARACTERS) -> str:
    """The text with everything escaped that isn't printable, a line's end and a terminal's commands included.

    What is longer than `limit` is cut, and ends with how much was left out.
    """
    left_out = len(text) - limit
    shown = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text[:limit])
    return f"{shown}… ({left_out} more characters)" if left_out > 0 else shown


class OneLine(logging.Formatter):
    """Time, level, logger, then the message as `one_line`; behind it the stack, if there is one, indented.

    `speaker` stands before each message.
    """

    def __init__(self, speaker: str = "") -> None:
        super().__init__(_FORMAT.format(speaker=speaker))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        """The event's line."""
        record.message = one_line(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:  # noqa: N802 - logging's own name
        """The stack; an exception's message may hold anything."""
        lines = super().formatException(ei).splitlines()  # type: ignore[arg-type]
        return "\n".join(INDENT + one_line(line) for line in lines)


def log_to_stderr(speaker: str = "") -> None:
    """Have this process log to stderr, from INFO on; `speaker` tells processes apart that share it."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine(speaker))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
