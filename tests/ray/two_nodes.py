"""A Ray cluster of two nodes on this machine, for as long as stdin is open.

It prints its address; then, for each name of a deployment that it reads, the deployment's status as a line of JSON.
A process of its own, so that Ray's threads, warnings and handlers stay out of the tests' process.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from ray.cluster_utils import Cluster

from paceline.protocol.errors import PacelineError
from paceline_ray.deployments import RunningDeployment, cluster_driver

OBJECT_STORE_BYTES = 80_000_000
CPUS_OF_A_NODE = 4
"""As Ray counts; they are shared."""


def answer(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - it is what the test waits for


def status_of(name: str) -> str:
    try:
        return json.dumps([asdict(line) for line in RunningDeployment.find(name).status()])
    except PacelineError as error:
        return json.dumps({"error": error.message})


def main() -> None:
    small: dict[str, int] = {"num_cpus": CPUS_OF_A_NODE, "object_store_memory": OBJECT_STORE_BYTES}
    # Two nodes of one host would each count its whole memory; no actor asks for any.
    cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    try:
        cluster.add_node(**small, resources={"small": 8})
        with cluster_driver(cluster.address):
            answer(cluster.address)
            for name in sys.stdin:
                answer(status_of(name.strip()))
    finally:
        # Never `ray stop`, which ends every Ray of the machine.
        cluster.shutdown()


if __name__ == "__main__":
    main()
