"""The rule of NetworkPolicies: open are the architecture's edges, DNS, traces and metrics, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from paceline.runtime.config import COORDINATOR_PORT, DRAFT_PORT, HTTP_PORT, TARGET_PORT
from tests.deploy.rendering import Object, Workload, matches, of_kind, workloads

OTLP_PORT = 4317
METRICS_PORT = 9464
OUTSIDE = {"observability": "otlp", "monitoring": "monitoring"}
"""What we call who is in a namespace of others."""
ANY = "any"


class Edge(NamedTuple):
    """Who may open a connection to whom; a port of "any" means all."""

    source: str
    destination: str
    port: int | str


def architecture(objects: list[Object]) -> set[Edge]:
    """The edges between the pods that are there, and to what each role needs outside."""
    edges = {
        Edge("client", "gateway", HTTP_PORT),
        Edge("client", "coordinator", COORDINATOR_PORT),
        Edge("gateway", "coordinator", COORDINATOR_PORT),
        Edge("coordinator", "target", TARGET_PORT),
        Edge("coordinator", "draft", DRAFT_PORT),
        Edge("client", "vllm", HTTP_PORT),
        Edge("vllm", "draft", DRAFT_PORT),
    }
    roles = {workload.role for workload in workloads(objects)}
    edges = {edge for edge in edges if {edge.source, edge.destination} <= roles | {"client"}}
    if "vllm" in roles:
        edges.add(Edge("vllm", "dns", 53))
    for role in roles - {"vllm"}:
        edges |= {Edge(role, "dns", 53), Edge(role, "otlp", OTLP_PORT), Edge("monitoring", role, METRICS_PORT)}
    if any(workload.part == "worker" for workload in workloads(objects)):
        edges.add(Edge("target", "target", ANY))
    return edges


def edges_are_the_architectures(objects: list[Object]) -> Iterator[str]:
    """Everything is denied but the edges, each of which both ends permit."""
    policies = of_kind(objects, "NetworkPolicy")
    if not policies or not any(workload.role == "coordinator" or workload.is_vllm for workload in workloads(objects)):
        return
    if {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]} not in [policy["spec"] for policy in policies]:
        yield "no policy denies what no other one allows"
    found, expected = _edges(policies, workloads(objects)), architecture(objects)
    for edge in sorted(found - expected, key=str):
        yield f"open, and no edge of the architecture: {edge}"
    for edge in sorted(expected - found, key=str):
        yield f"closed, though the architecture needs it: {edge}"


def _edges(policies: list[Object], pods: list[Workload]) -> set[Edge]:
    into, out = _permitted(policies, pods, "ingress"), _permitted(policies, pods, "egress")
    inside = {workload.role for workload in pods}
    both = {edge for edge in into & out if edge.destination in inside and edge.source in inside}
    # What is outside has no policy of ours: one side's word is enough.
    return both | {e for e in into if e.source not in inside} | {e for e in out if e.destination not in inside}


def _permitted(policies: list[Object], pods: list[Workload], direction: str) -> set[Edge]:
    edges = set()
    for policy in policies:
        for rule in policy["spec"].get(direction, []):
            ports = {port["port"] for port in rule.get("ports", [])} or {ANY}
            peers = rule.get("from" if direction == "ingress" else "to") or [{}]
            for own in {workload.role for workload in pods if _selects(policy, workload)}:
                for other in {name for peer in peers for name in _names(peer, pods)}:
                    ends = (other, own) if direction == "ingress" else (own, other)
                    edges |= {Edge(*ends, port) for port in ports}
    return edges


def _selects(policy: Object, workload: Workload) -> bool:
    return matches(policy["spec"]["podSelector"], workload.labels)


def _names(peer: Object, pods: list[Workload]) -> set[str]:
    """What the rule calls a peer: roles of ours, what we know outside, or the peer itself."""
    if peer == {"namespaceSelector": {}, "podSelector": {"matchLabels": {"paceline.dev/client": "true"}}}:
        return {"client"}
    space = peer.get("namespaceSelector", {}).get("matchLabels", {}).get("kubernetes.io/metadata.name")
    if space == "kube-system" and peer["podSelector"]["matchLabels"] == {"k8s-app": "kube-dns"}:
        return {"dns"}
    if space in OUTSIDE:
        return {OUTSIDE[space]}
    if "podSelector" in peer and "namespaceSelector" not in peer:
        return {workload.role for workload in pods if matches(peer["podSelector"], workload.labels)}
    return {str(peer)}


RULES = (edges_are_the_architectures,)
