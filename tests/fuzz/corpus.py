"""Valid messages that mutations begin with: those that are stored of the protocol's version, and what they lack."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message

from paceline.protocol import codec
from paceline.protocol.proposal import ROOT, Outcome, Proposal
from paceline.protocol.target import Prefetch
from tests.protocol.test_compatibility import STORED, parsed

_CHAIN = Proposal(0, (4, 5, 6), (1.0,) * 3)
_TREE = Proposal(0, (4, 5, 6), (1.0,) * 3, (ROOT, ROOT, 0))
FURTHER = {"target_command": [Prefetch(3, 9, ((Outcome(9, ROOT, 4), _CHAIN), (Outcome(9, 0, 7), _TREE)))]}
"""None of the stored ones has a prefetched proposal."""


@functools.cache
def stored_messages(name: str) -> tuple[Message, ...]:
    """The valid messages of one kind."""
    stored = [parsed(each) for each in STORED[name]]
    return (*stored, *(codec.encode_target_command(each) for each in FURTHER.get(name, ())))


@functools.cache
def parts_of_messages() -> tuple[Message, ...]:
    """Every message in the stored ones, their parts too: what is borrowed from."""
    return tuple(part for name in STORED for message in stored_messages(name) for part in _within(message))


def _within(message: Any) -> Iterator[Message]:
    yield message
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in value if field.is_repeated else [value]:
            yield from _within(part)
