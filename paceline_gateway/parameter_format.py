"""How a template writes arguments one by one: `<parameter=city>Bonn</parameter>`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile


@dataclass(frozen=True)
class ParameterFormat:
    """The text around one argument: `before_name` NAME `before_value` VALUE `behind_value`, white space kept."""

    before_name: str
    before_value: str
    behind_value: str


@dataclass(frozen=True)
class WrittenArguments:
    """A call's text behind its function's name: `head`, arguments if any, `tail`."""

    head: str
    each: ParameterFormat
    tail: str


def read_arguments(none: str, two: str, probes: Sequence[str]) -> WrittenArguments | None:
    """Take a call's text behind its name apart.

    Args:
        none: of a call without arguments.
        two: of one with two arguments.
        probes: name and value of the first argument, then of the second.

    Returns:
        None: it is written in another way.
    """
    pieces = _between(two, probes)
    if pieces is None:
        return None
    first, before_value, following, again, rest = pieces
    # A tag's first character is no part of what both have in front of it.
    head = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(none, first, strict=False)))
    head = head.rstrip("<[")
    before_name, tail = first[len(head) :], none[len(head) :]
    behind_value = following.removesuffix(before_name)
    parts = (before_name.strip(), before_value.strip(), behind_value.strip(), tail.strip())
    whole = following == behind_value + before_name and rest == behind_value + tail and before_value == again
    if not whole or not all(parts):
        return None
    return WrittenArguments(head, ParameterFormat(before_name, before_value, behind_value), tail)


def _between(text: str, probes: Sequence[str]) -> list[str] | None:
    """What stands before, between and behind texts that come in this order."""
    pieces = []
    for probe in probes:
        before, found, text = text.partition(probe)
        if not found:
            return None
        pieces.append(before)
    return [*pieces, text]
