"""Bad input gets an error that names field, value and limit, and the service goes on."""

from __future__ import annotations

import re
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


def request(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"max_new_tokens": 8, "seed": 1, "tokens": {"token_ids": [1, 2, 3]}, **fields})


CASES: list[tuple[dict[str, Any], str, str]] = [  # `tests/coordinator/test_bounds.py` has every field
    ({"prompt": "", "tokens": None}, "prompt", "at least 1"),
    ({"tokens": None}, "input", ""),
    ({"sampling": {"temperature": float("nan")}}, "temperature = nan", r"\[0, 100\]"),
    ({"max_new_tokens": 100_000}, "max_new_tokens = 100000", "at most 4093"),
    ({"speculation": {"drafter": "oracle"}}, "drafter = 'oracle'", "one of: auto, ngram, model"),
    (
        {"acceptance": types_pb2.ACCEPTANCE_REJECTION, "speculation": {"tree_widths": [2, 2]}},
        "tree_widths",
        "coupled",
    ),
    ({"resume_token_ids": [4], "seed": None}, "seed", "resume_token_ids"),
]


@pytest.mark.parametrize(("fields", "names", "limit"), CASES, ids=[f"{case[1]}" for case in CASES])
def test_the_error_names_field_value_and_limit(
    cluster: Cluster, fields: dict[str, Any], names: str, limit: str
) -> None:
    error = refusal(cluster, request(**fields))
    assert isinstance(error, InvalidInput)
    assert names in error.message
    assert re.search(limit, error.message), error.message
    still_serves(cluster)


def test_an_unknown_model_is_named(cluster: Cluster) -> None:
    error = refusal(cluster, request(model="gpt-9"))
    assert isinstance(error, UnknownModel)
    assert "gpt-9" in error.message
    still_serves(cluster)


def refusal(cluster: Cluster, message: pb.GenerateRequest) -> PacelineError:
    with grpc.insecure_channel(cluster.address) as channel:
        stub = pb_grpc.GenerationServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(message, timeout=20))
    return from_rpc_error(caught.value)


def still_serves(cluster: Cluster) -> None:
    with cluster.client() as client:
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
