"""Bad input gets an error that names field, value and limit, and the service goes on."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from paceline.protocol.errors import InvalidInput, PacelineError, UnknownModel
from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.rpc.statuses import from_rpc_error
from paceline.v1 import generation_service_pb2 as pb
from paceline.v1 import generation_service_pb2_grpc as pb_grpc
from paceline.v1 import types_pb2
from tests.e2e.cluster import NEAR, Cluster

# `tests/coordinator/test_bounds.py` has every field.
CASES: list[tuple[dict[str, Any], type[PacelineError], tuple[str, ...]]] = [
    ({"tokens": None}, InvalidInput, ("input",)),
    ({"max_new_tokens": 100_000}, InvalidInput, ("max_new_tokens = 100000", "at most 4093")),
    ({"speculation": {"drafter": "oracle"}}, InvalidInput, ("drafter = 'oracle'", "one of: auto, ngram, model")),
    (
        {"acceptance": types_pb2.ACCEPTANCE_REJECTION, "speculation": {"tree_widths": [2, 2]}},
        InvalidInput,
        ("tree_widths", "coupled"),
    ),
    ({"model": "gpt-9"}, UnknownModel, ("gpt-9",)),
]


def test_the_error_names_field_value_and_limit(cluster: Cluster) -> None:
    sound: dict[str, Any] = {"max_new_tokens": 8, "seed": 1, "tokens": {"token_ids": [1, 2, 3]}}
    with grpc.insecure_channel(cluster.address) as channel, cluster.client() as client:
        stub = pb_grpc.GenerationServiceStub(channel)
        for fields, kind, words in CASES:
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.Generate(pb.GenerateRequest(**sound | fields), timeout=20))
            error = from_rpc_error(caught.value)
            assert isinstance(error, kind)
            assert all(word in error.message for word in words), error.message
            assert len(client.generate(GenerateRequest(token_ids=(1,), max_new_tokens=2)).token_ids) == 2


def test_a_drafter_is_called_as_the_flag_calls_it(cluster: Cluster) -> None:
    drafters = {}
    with cluster.client() as client:
        for name in ("model", f"model:{NEAR}"):
            named = SpeculationSettings(drafter=name, num_draft_tokens=2)
            asked = GenerateRequest(token_ids=(1,), max_new_tokens=12, ignore_eos=True, speculation=named)
            records = client.generate(asked).stats.records
            drafters[name] = {record.drafter for record in records if record.proposed}
        assert {"auto", "ngram", *drafters} == set(client.describe_models()[0].drafters)
    assert set(map(frozenset, drafters.values())) == {frozenset({"model"})}
