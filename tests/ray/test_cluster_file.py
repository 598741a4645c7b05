"""`deploy/ray/cluster.yaml` as Ray's own launcher reads it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import ValidationError
from ray.autoscaler._private.util import prepare_config, validate_config

FILE = Path(__file__).parents[2] / "deploy" / "ray" / "cluster.yaml"


@pytest.fixture
def given() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return loaded


def test_ray_accepts_it(given: dict[str, Any]) -> None:
    prepared = prepare_config(copy.deepcopy(given))
    validate_config(prepared)
    assert prepared["available_node_types"].keys() == given["available_node_types"].keys()


def test_ray_would_refuse_a_mistake(given: dict[str, Any]) -> None:
    given["available_node_type"] = given.pop("available_node_types")
    with pytest.raises(ValidationError):
        validate_config(prepare_config(given))


def test_every_node_keeps_its_statistics_and_a_small_object_store(given: dict[str, Any]) -> None:
    starts = [
        line
        for commands in ("head_start_ray_commands", "worker_start_ray_commands")
        for line in given[commands]
        if "ray start" in line
    ]
    assert len(starts) == 2
    for line in starts:
        assert "RAY_USAGE_STATS_ENABLED=0" in line
        assert "--object-store-memory=100000000" in line
