"""No field of a message can be large: each that has a size has a bound, and is refused by it before any work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

from paceline.protocol import codec
from paceline.protocol.codec.copying import Elsewhere, Most, bounds_of, check_bounds
from paceline.protocol.errors import InvalidInput
from paceline.protocol.target import MAX_AT_WORK
from paceline.rpc import link_kinds
from paceline.v1 import draft_service_pb2, generation_service_pb2, target_service_pb2, types_pb2
from tests.protocol.test_codec import DECODERS

FILES = (types_pb2, draft_service_pb2, target_service_pb2, generation_service_pb2)
ELSEWHERE = {
    "ChatMessage.content": "prompts.py",
    "ChatMessage.role": "three words",
    "DraftOpened.feature_layers": "nobody reads",
    "DraftRequest.commands": "MAX_FRAME_MESSAGES",
    "DraftResponse.events": "MAX_FRAME_MESSAGES",
    "Features.layer_ids": "nobody reads",
    "GeneratedTokens.text": "copied once",
    "GenerateRequest.prediction_text": "prompts.py",
    "GenerateRequest.prompt": "prompts.py",
    "GenerationFinished.text": "copied once",
    "Grammar.json_schema": "Grammar looks",
    "Grammar.lark": "Grammar looks",
    "Grammar.regex": "Grammar looks",
    "TargetOpen.feature_layers": "nobody reads",
    "TraceContext.traceparent": "ignored",
    "VerifyRequest.commands": "MAX_FRAME_MESSAGES",
    "VerifyResponse.events": "MAX_FRAME_MESSAGES",
}
"""Fields that their message doesn't bound, and a part of the reason."""


def messages() -> Iterator[Any]:
    for file in FILES:
        yield from file.DESCRIPTOR.message_types_by_name.values()


def sized_fields() -> Iterator[tuple[Any, Any]]:
    for message in messages():
        for field in message.fields:
            if field.is_repeated or field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
                yield message, field


SIZED = [f"{message.name}.{field.name}" for message, field in sized_fields()]
BOUNDED = [name for name in SIZED if name not in {*ELSEWHERE, "VerifyResponse.at_work"}]


def descriptor_of(name: str) -> Any:
    """Of the message that has a field."""
    return next(each for each in messages() if each.name == name.partition(".")[0])


def bound_of(name: str) -> Most | Elsewhere:
    return bounds_of(descriptor_of(name))[name.partition(".")[2]]


def fill(message: Any, name: str, count: int) -> None:
    """So many values, or bytes, in a field."""
    field = message.DESCRIPTOR.fields_by_name[name]
    if field.type == FieldDescriptor.TYPE_STRING and not field.is_repeated:
        setattr(message, name, "x" * count)
    elif field.type == FieldDescriptor.TYPE_BYTES:
        setattr(message, name, bytes(count))
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        for key in range(count):
            named = field.message_type.fields_by_name["key"].type == FieldDescriptor.TYPE_STRING
            getattr(message, name)[str(key) if named else key] = str(key) if named else 0.0
    elif field.message_type is not None:
        empty = GetMessageClass(field.message_type)()
        getattr(message, name).extend([empty] * count)
    elif field.type == FieldDescriptor.TYPE_STRING:
        getattr(message, name).extend(str(number) for number in range(count))
    else:
        getattr(message, name).extend([0] * count)


def paths_to(root: Any, wanted: Any) -> Iterator[tuple[Any, ...]]:
    """Fields that lead from a message to one inside it, none twice."""
    if root is wanted:
        yield ()
        return
    for field in root.fields:
        inner = field.message_type
        if inner is not None and not inner.GetOptions().map_entry:
            yield from ((field, *rest) for rest in paths_to(inner, wanted))


def inside(message: Any, path: tuple[Any, ...]) -> Any:
    for field in path:
        inner = getattr(message, field.name)
        message = inner.add() if field.is_repeated else inner
        if not field.is_repeated:
            message.SetInParent()
    return message


def test_every_field_with_a_size_has_a_bound_or_a_reason() -> None:
    elsewhere = {name: bound.why for name in SIZED if isinstance(bound := bound_of(name), Elsewhere)}
    assert elsewhere.keys() == ELSEWHERE.keys()
    for name, why in ELSEWHERE.items():
        assert why in elsewhere[name], name


SMALL = [name for name in BOUNDED if isinstance(most := bound_of(name), Most) and most.limit <= 4096]


def over(name: str, message: Any) -> Most:
    """Fill a field by one more than may be; returns its bound."""
    bound = bound_of(name)
    assert isinstance(bound, Most)
    fill(message, name.partition(".")[2], bound.limit + 1)
    return bound


@pytest.mark.parametrize("name", BOUNDED)
def test_one_more_than_the_bound_is_refused_by_every_reader_before_any_work(name: str) -> None:
    """Wherever the field stands. The messages are otherwise empty; what is refused first there is refused at once."""
    ways = [(root, path) for root in DECODERS for path in paths_to(root.DESCRIPTOR, descriptor_of(name))]
    assert ways, f"nobody reads {name}"
    for root, path in ways:
        message = root()
        bound = over(name, inside(message, path))
        began = time.process_time()
        with pytest.raises(InvalidInput) as caught:
            read_all(DECODERS[root](message))
        assert time.process_time() - began < 0.1, path
        if all(field.containing_oneof for field in path):
            assert caught.value.metadata["field"] == bound.name
            assert caught.value.metadata["limit"].startswith(f"at most {bound.limit}")


@pytest.mark.parametrize("name", SMALL)
def test_what_is_at_its_bound_passes(name: str) -> None:
    bound = bound_of(name)
    assert isinstance(bound, Most)
    message = GetMessageClass(descriptor_of(name))()
    fill(message, name.partition(".")[2], bound.limit)
    check_bounds(message)


def test_a_sign_of_life_names_no_more_sessions_than_may_be() -> None:
    frame = target_service_pb2.VerifyResponse(at_work=range(MAX_AT_WORK + 1))
    with pytest.raises(InvalidInput, match="at_work sessions"):
        list(link_kinds.TARGET.signs(frame))


def read_all(decoded: Any) -> None:
    """A drafted proposal is read late."""
    getattr(decoded, "proposal", None)
    getattr(decoded, "timings", None)


def test_the_names_of_a_welcome_are_bounded_one_by_one() -> None:
    with pytest.raises(InvalidInput, match="bytes of one of welcome drafters = 513: must be at most 512"):
        codec.decode_welcome(types_pb2.Welcome(drafters=["a", "b" * 513]))
