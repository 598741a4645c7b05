"""Writes what `test_compatibility` compares with: `python -m tests.protocol.stored`.

Run it when a version of the protocol is released, never to make that test pass.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, json_format, symbol_database
from google.protobuf.message import Message
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from paceline.v1 import draft_service_pb2, generation_service_pb2, target_service_pb2, types_pb2

FOLDER = Path(__file__).parent / "v1"
DESCRIPTORS, MESSAGES = FOLDER / "descriptors.binpb", FOLDER / "messages.json"
FILES = (types_pb2, target_service_pb2, draft_service_pb2, generation_service_pb2)
OF_EACH = 12


def as_json(message: Message) -> dict[str, Any]:
    """Protobuf's JSON with its own field names."""
    fields: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return fields


def described(full_name: str) -> type[Message]:
    """The present class of a message."""
    found: type[Message] = symbol_database.Default().GetSymbol(full_name)
    return found


def examples(encode: Any, strategy: st.SearchStrategy[Any]) -> list[Message]:
    """Messages of one kind, the same in every run."""
    found: list[Message] = []

    @seed(1)
    @settings(
        max_examples=OF_EACH,
        database=None,
        phases=(Phase.generate,),
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(encode(value))

    collect()
    return found


def main() -> None:
    """Write descriptors and messages."""
    from tests.protocol.test_codec import PAIRS

    descriptors = descriptor_pb2.FileDescriptorSet()
    for module in FILES:
        module.DESCRIPTOR.CopyToProto(descriptors.file.add())
    FOLDER.mkdir(exist_ok=True)
    DESCRIPTORS.write_bytes(descriptors.SerializeToString(deterministic=True))
    stored = {
        name: [
            {
                "type": message.DESCRIPTOR.full_name,
                "bytes": base64.b64encode(message.SerializeToString(deterministic=True)).decode(),
                "json": as_json(message),
            }
            for message in examples(encode, strategy)
        ]
        for name, (encode, _, strategy) in PAIRS.items()
    }
    MESSAGES.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
