"""`deploy/ray/cluster.yaml` as Ray's own launcher reads it."""

from __future__ import annotations

import copy
from pathlib import Path

import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

FILE = Path(__file__).parents[2] / "deploy" / "ray" / "cluster.yaml"


def test_ray_accepts_it_and_every_node_keeps_its_statistics_and_a_small_object_store() -> None:
    given = yaml.safe_load(FILE.read_text())
    prepared = prepare_config(copy.deepcopy(given))
    validate_config(prepared)
    assert prepared["available_node_types"].keys() == given["available_node_types"].keys()
    commands = (*given["head_start_ray_commands"], *given["worker_start_ray_commands"])
    starts = [line for line in commands if "ray start" in line]
    assert len(starts) == 2
    for line in starts:
        assert "RAY_USAGE_STATS_ENABLED=0" in line
        assert "--object-store-memory=100000000" in line
