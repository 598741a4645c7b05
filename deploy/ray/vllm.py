"""A vLLM server and Paceline's draft service, each on GPUs that Ray chooses: `python deploy/ray/vllm.py --help`.

Both programs are on every node; the model and the draft have names of the hub. Ctrl-C ends both. Where Ray starts the
draft again on another node, vLLM goes on without drafts until it is started anew.
"""

from __future__ import annotations

import argparse
import json
import subprocess

import ray
import ray.util

PORT = 50052


@ray.remote(max_restarts=-1)
class Program:
    """A program on a node of the cluster; it ends with its actor."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command)  # noqa: S603  # of this file

    def node(self) -> str:
        """The address of its node."""
        return str(ray.util.get_node_ip_address())

    def wait(self) -> int:
        """Wait until it ends; returns its status."""
        return self._process.wait()


def draft_command(model: str, draft: str) -> list[str]:
    """A draft service for a target's model."""
    own = ["--target-model", model, "--drafter", f"model:{draft}", "--host", "0.0.0.0", "--port", str(PORT)]  # noqa: S104
    return ["paceline", "draft-service", *own]


def vllm_command(model: str, degree: int, draft_node: str) -> list[str]:
    """A vLLM server that asks the draft service on a node."""
    drafts = {"paceline": {"draft": {"address": f"{draft_node}:{PORT}"}}}
    proposer = {"method": "custom_class", "model": "paceline_vllm.DraftProposer", "num_speculative_tokens": 4}
    own = ["--additional-config", json.dumps(drafts), "--speculative-config", json.dumps(proposer)]
    return ["vllm", "serve", model, "--tensor-parallel-size", str(degree), *own]


def main() -> None:
    """Place both, and wait for the server."""
    parser = argparse.ArgumentParser(description="vLLM on large GPUs, its drafts on a share of a small one.")
    parser.add_argument("--address", default="auto", help="of the Ray cluster")
    parser.add_argument("--model", default="Qwen/Qwen3-8B")
    parser.add_argument("--draft", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--degree", type=int, default=1, help="GPUs of vLLM, all of one node")
    parser.add_argument("--draft-gpus", type=float, default=0.25, help="share of a GPU for the draft")
    parser.add_argument("--draft-resource", default="small_gpu", help="resource of the nodes that draft; empty: none")
    flags = parser.parse_args()
    ray.init(address=flags.address)
    resources = {flags.draft_resource: flags.draft_gpus} if flags.draft_resource else {}
    draft = Program.options(num_gpus=flags.draft_gpus, resources=resources).remote(  # type: ignore[attr-defined]
        draft_command(flags.model, flags.draft)
    )
    node = ray.get(draft.node.remote())
    server = Program.options(num_gpus=flags.degree).remote(  # type: ignore[attr-defined]
        vllm_command(flags.model, flags.degree, node)
    )
    print(f"draft service at {node}:{PORT}, vLLM at {ray.get(server.node.remote())}:8000")  # noqa: T201
    raise SystemExit(ray.get(server.wait.remote()))


if __name__ == "__main__":
    main()
