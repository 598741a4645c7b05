"""Version 1 of the protocol against itself as it was stored: services of two versions understand each other.

`tests/protocol/v1/` holds descriptors and messages that `python -m tests.protocol.stored` wrote once. A field
may be added; a field that changes its number, type or meaning, or that disappears, fails here.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.protocol.stored import DESCRIPTORS, MESSAGES, as_json, described
from tests.protocol.test_codec import PAIRS

STORED: dict[str, list[dict[str, Any]]] = json.loads(MESSAGES.read_text())


def old_classes(changed: FileDescriptorSet | None = None) -> dict[str, type[Message]]:
    """Message classes by their full names, as they were stored, or as a test would have them."""
    descriptors = changed or FileDescriptorSet.FromString(DESCRIPTORS.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in descriptors.file:
        pool.Add(file)
    return message_factory.GetMessageClassesForFiles([file.name for file in descriptors.file], pool)


OLD = old_classes()


def read_by(classes: dict[str, type[Message]], message: Message) -> dict[str, Any]:
    """What a service with these classes reads."""
    old = classes[message.DESCRIPTOR.full_name]
    return as_json(old.FromString(message.SerializeToString()))


def is_part_of(old: Any, new: Any) -> bool:
    """Whether all that an old service read is there, as it was meant."""
    if isinstance(old, dict) and isinstance(new, dict):
        return all(key in new and is_part_of(value, new[key]) for key, value in old.items())
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(is_part_of, old, new))
    return bool(old == new)


def parsed(stored: dict[str, Any]) -> Message:
    """A stored message, read with the present classes."""
    return described(stored["type"]).FromString(base64.b64decode(stored["bytes"]))


@pytest.mark.parametrize("name", PAIRS)
def test_stored_messages_are_read_as_they_were_meant(name: str) -> None:
    encode, decode, _ = PAIRS[name]
    assert STORED[name], "messages are stored of every kind"
    for stored in STORED[name]:
        message = parsed(stored)
        assert as_json(message) == stored["json"]
        assert is_part_of(stored["json"], as_json(encode(decode(message)))), "the dataclass says the same"


@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_message_comes_back_as_it_went_and_can_be_read_by_old_services(name: str, data: st.DataObject) -> None:
    encode, decode, strategy = PAIRS[name]
    value = data.draw(strategy)
    message = encode(value)
    sent = message.SerializeToString()
    assert decode(type(message).FromString(sent)) == value
    old = OLD[message.DESCRIPTOR.full_name].FromString(sent)
    assert is_part_of(as_json(old), as_json(message))
    # By what it means: an old service forgets whether a 0 was said (`top_k`, `min_p`).
    assert decode(type(message).FromString(old.SerializeToString())) == value, "what it passes on is whole"


def test_mutant_a_changed_field_is_noticed() -> None:
    """Two fields change places: the bytes are read, and mean something else."""
    changed = FileDescriptorSet.FromString(DESCRIPTORS.read_bytes())
    (outcome,) = [each for file in changed.file for each in file.message_type if each.name == "Outcome"]
    first, last = outcome.field[0], outcome.field[2]
    first.number, last.number = last.number, first.number
    (stored,) = [each for each in STORED["draft_command"] if "commit" in each["json"]][:1]
    message = parsed(stored)
    assert not is_part_of(read_by(old_classes(changed), message), as_json(message))
