"""Each rule refuses the mistake that it is for: a rendering is changed, and the complaint says what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.deploy import network_rules as network
from tests.deploy import pod_rules as pods
from tests.deploy import wiring_rules as wiring
from tests.deploy.rendering import Composition, Object, named, of_kind, render
from tests.deploy.schemas import core_errors, is_custom, outline_errors

BASE = Composition("base")
DEMO = Composition("overlays/cpu-demo")
SINGLE = Composition("overlays/single-node-gpu")
RANKS = Composition("base/lws")
SECURE = Composition("base", ("tls",))
POLICIES = Composition("base", ("networkpolicy",))
RANK_POLICIES = Composition("base/lws", ("networkpolicy",))
SCALED = Composition("base", ("metrics", "keda"))
VLLM = Composition("overlays/vllm")
VLLM_SECURE = Composition("base", ("vllm-target", "gpu-small", "tls"))
Change = Callable[[list[Object]], Any]
Rule = Callable[[list[Object]], Any]


def pod(objects: list[Object], role: str) -> Any:
    return named(objects, "Deployment", f"paceline-{role}")["spec"]["template"]["spec"]


def container(objects: list[Object], role: str) -> Any:
    return pod(objects, role)["containers"][0]


def file(objects: list[Object], role: str, old: str, new: str) -> None:
    """Replace text in a role's TOML file, which has it."""
    (data,) = (each["data"] for each in of_kind(objects, "ConfigMap") if f"{role}.toml" in each["data"])
    assert old in data[f"{role}.toml"]
    data[f"{role}.toml"] = data[f"{role}.toml"].replace(old, new)


def group(objects: list[Object]) -> Any:
    """What a LeaderWorkerSet makes its pods of."""
    return of_kind(objects, "LeaderWorkerSet")[0]["spec"]["leaderWorkerTemplate"]


def ranks(objects: list[Object], part: str) -> Any:
    return group(objects)[f"{part}Template"]["spec"]


def service(objects: list[Object], role: str) -> Any:
    return named(objects, "Service", f"paceline-{role}")["spec"]


def policy(objects: list[Object], name: str) -> Any:
    return named(objects, "NetworkPolicy", name)["spec"]


def topology(objects: list[Object], role: str) -> Any:
    """The labels by which a role's pods are spread over a topology."""
    return pod(objects, role)["topologySpreadConstraints"][0]["labelSelector"]


def lack_of(source: str, destination: str, port: int | str) -> str:
    """The complaint that an edge is denied."""
    return f"closed, though the architecture needs it: {network.Edge(source, destination, port)}"


def variable(name: str, **more: Any) -> Change:
    """Give the target's container a variable."""
    return lambda objects: container(objects, "target").update(env=[{"name": name, **more}])


def argument(objects: list[Object], old: str, new: str) -> None:
    """Replace an argument of a group's leader, which has it."""
    arguments = ranks(objects, "leader")["containers"][0]["args"]
    arguments[arguments.index(old)] = new


def vllm_argument(objects: list[Object], place: int, old: str, new: str) -> None:
    """Change an argument of vLLM's, which has it."""
    arguments = named(objects, "Deployment", "vllm")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert old in arguments[place]
    arguments[place] = arguments[place].replace(old, new)


MISTAKES: dict[Rule, list[tuple[Composition, Change, str]]] = {
    pods.restricted: [
        (BASE, lambda o: pod(o, "draft")["securityContext"].update(runAsNonRoot=False), "as root"),
        (BASE, lambda o: pod(o, "draft")["securityContext"].pop("seccompProfile"), "seccomp"),
        (BASE, lambda o: pod(o, "draft").update(hostNetwork=True), "namespace of its node"),
        (BASE, lambda o: pod(o, "draft")["volumes"].append({"name": "x", "hostPath": {}}), "path of its"),
        (BASE, lambda o: container(o, "target")["securityContext"].pop("capabilities"), "capabilities"),
        (DEMO, lambda o: pod(o, "target")["initContainers"][0].pop("securityContext"), "escalate"),
        (BASE, lambda o: container(o, "target")["securityContext"].pop("readOnlyRootFilesystem"), "is writable"),
    ],
    pods.writable_where_needed: [
        (BASE, lambda o: container(o, "draft")["volumeMounts"].pop(), "writable at /tmp"),
        (BASE, lambda o: pod(o, "draft")["volumes"].pop(), "no volume tmp"),
        (BASE, lambda o: container(o, "draft")["volumeMounts"][1].update(readOnly=True), "writable at /cache"),
    ],
    pods.no_tokens: [
        (BASE, lambda o: pod(o, "target").pop("automountServiceAccountToken"), "mounts a token"),
        (BASE, lambda o: pod(o, "target").pop("enableServiceLinks"), "named like settings"),
        (BASE, lambda o: pod(o, "target").pop("serviceAccountName"), "ServiceAccount of its own"),
        (BASE, lambda o: of_kind(o, "ServiceAccount")[0].pop("automountServiceAccountToken"), "mounts its token"),
    ],
    pods.no_secret_in_environment: [
        (BASE, variable("HF_TOKEN", value="x"), "HF_TOKEN looks like a secret"),
        (BASE, variable("X", valueFrom={"secretKeyRef": {}}), "X looks like a secret"),
        (BASE, lambda o: container(o, "target").update(envFrom=[{"secretRef": {}}]), "a Secret as environment"),
    ],
    pods.requests_are_limits_on_gpus: [
        (SINGLE, lambda o: container(o, "draft")["resources"]["limits"].update(memory="99Gi"), "requests"),
        (BASE, lambda o: container(o, "draft")["resources"].pop("limits"), "memory without a limit"),
    ],
    pods.gpus_are_the_degree: [
        (SINGLE, lambda o: container(o, "target")["args"].append("--tensor-parallel-size=2"), "2 on 1 GPUs"),
        (SINGLE, lambda o: container(o, "draft")["resources"]["limits"].update({pods.GPU: 2}), "2 GPUs"),
        (RANKS, lambda o: argument(o, "--nproc-per-node=4", "--nproc-per-node=3"), "3 ranks on 4"),
        (RANKS, lambda o: group(o).update(size=3), "tensor_parallel_size 8 on 12 GPUs"),
    ],
    pods.time_to_drain: [
        (BASE, lambda o: pod(o, "target").pop("terminationGracePeriodSeconds"), "30 s of grace"),
        (BASE, lambda o: container(o, "target").pop("lifecycle"), "preStop of 0 s"),
        (BASE, lambda o: file(o, "gateway", "= 120", "= 136"), "136 s of drain"),
        (RANKS, lambda o: argument(o, "--shutdown-timeout=130", "--shutdown-timeout=30"), "torchrun"),
        (RANKS, lambda o: ranks(o, "worker")["containers"][0].pop("lifecycle"), "while rank 0 drains"),
    ],
    pods.disruption_budgets: [
        (BASE, lambda o: o.remove(named(o, "PodDisruptionBudget", "paceline-draft")), "no PodDisruptionBudget")
    ],
    pods.apart: [
        (BASE, lambda o: pod(o, "draft").pop("affinity"), "no anti-affinity"),
        (BASE, lambda o: pod(o, "draft").pop("topologySpreadConstraints"), "no topology spread"),
    ],
    wiring.selectors_match: [
        (BASE, lambda o: service(o, "draft")["selector"].update(a="b"), "selects no pod"),
        (BASE, lambda o: of_kind(o, "Deployment")[0]["spec"].update(selector={"matchLabels": {"a": "b"}}), "its own"),
        (BASE, lambda o: topology(o, "draft").update(matchLabels={"a": "b"}), "spreads other pods"),
    ],
    wiring.services_select_who_serves: [
        (RANKS, lambda o: service(o, "target")["selector"].pop("paceline.dev/rank"), "does not listen")
    ],
    wiring.settings_load: [
        (BASE, lambda o: file(o, "target", "threads", "treads"), "engine.treads"),
        (BASE, lambda o: file(o, "gateway", "smollm2-135m", "other"), "models differ"),
        (BASE, lambda o: container(o, "draft").update(command=["paceline", "serve"]), "no command"),
        (BASE, lambda o: container(o, "draft").update(args=["--config=/etc/x.toml"]), "is mounted"),
    ],
    wiring.environment_is_known: [
        (BASE, variable("PACELINE_HOMES", value="x"), "nothing reads PACELINE_HOMES"),
        (BASE, variable("OTEL_ENDPOINT", value="x"), "nothing reads OTEL_ENDPOINT"),
    ],
    wiring.ports_agree: [
        (BASE, lambda o: file(o, "target", "= 50053", "= 50054"), "has ports"),
        (BASE, lambda o: file(o, "target", '"0.0.0.0"', '"127.0.0.1"'), "127.0.0.1 alone"),
        (BASE, lambda o: service(o, "draft")["ports"][0].update(port=1), "'port': 1"),
        (BASE, lambda o: service(o, "draft").pop("clusterIP"), "headless"),
        (BASE, lambda o: service(o, "gateway").update(clusterIP="None"), "HTTP clients choose no pod"),
    ],
    wiring.peers_are_services: [
        (BASE, lambda o: file(o, "coordinator", "paceline-draft:", "drafts:"), "no Service"),
        (BASE, lambda o: file(o, "coordinator", ":50052", ":50055"), "a port that it has not"),
        (BASE, lambda o: file(o, "gateway", "coordinator:", "target:"), "of others"),
    ],
    wiring.vllm_has_its_drafts: [
        (VLLM, lambda o: vllm_argument(o, 0, "Qwen/Qwen3-8B", "Qwen/Qwen3-4B"), "draft is for Qwen/Qwen3-8B"),
        (VLLM, lambda o: vllm_argument(o, 2, "DraftProposer", "Proposer"), "no proposer of ours"),
        (VLLM, lambda o: vllm_argument(o, 3, "paceline-draft", "paceline-drafts"), "which is no Service"),
        (VLLM, lambda o: vllm_argument(o, 3, "address", "adress"), "adress"),
        (VLLM_SECURE, lambda o: vllm_argument(o, -1, ".paceline.draft", ""), "vllm: mutual TLS to the draft"),
    ],
    wiring.probes_ask_real_services: [
        (BASE, lambda o: container(o, "target")["readinessProbe"]["grpc"].pop("service"), "readinessProbe asks"),
        (BASE, lambda o: container(o, "target").pop("startupProbe"), "asks None"),
        (BASE, lambda o: container(o, "target")["livenessProbe"].update(failureThreshold=2), "within a minute"),
        (BASE, lambda o: container(o, "gateway")["startupProbe"]["httpGet"].update(path="/health"), "startupProbe"),
    ],
    wiring.tls_is_the_edges: [
        (SECURE, lambda o: container(o, "gateway")["args"].pop(), "gateway: mutual TLS"),
        (SECURE, lambda o: container(o, "draft")["args"].pop(), "draft at one end"),
    ],
    wiring.references_exist: [
        (BASE, lambda o: o.remove(of_kind(o, "ConfigMap")[0]), "names ConfigMap"),
        (BASE, lambda o: pod(o, "draft").update(priorityClassName="high"), "PriorityClass high"),
        (BASE, lambda o: of_kind(o, "Service")[0]["metadata"].pop("namespace"), "namespaces"),
        (SCALED, lambda o: o.remove(of_kind(o, "Deployment")[1]), "names Deployment"),
    ],
    wiring.autoscalers_own_the_replicas: [
        (SCALED, lambda o: named(o, "Deployment", "paceline-draft")["spec"].update(replicas=3), "sets replicas")
    ],
    wiring.images_are_pinned: [
        (DEMO, lambda o: container(o, "draft").update(image="a/b:latest"), "not pinned"),
        (BASE, lambda _: None, "image paceline-draft is not pinned"),
    ],
    network.edges_are_the_architectures: [
        (POLICIES, lambda o: policy(o, "target").update(ingress=[{}]), "open, and"),
        (POLICIES, lambda o: policy(o, "coordinator")["egress"].pop(), lack_of("coordinator", "draft", 50052)),
        (POLICIES, lambda o: policy(o, "coordinator")["ingress"].pop(), lack_of("gateway", "coordinator", 50051)),
        (POLICIES, lambda o: o.remove(named(o, "NetworkPolicy", "gateway")), lack_of("client", "gateway", 8000)),
        (POLICIES, lambda o: o.remove(named(o, "NetworkPolicy", "deny")), "no policy denies"),
        (RANK_POLICIES, lambda o: o.remove(named(o, "NetworkPolicy", "ranks")), lack_of("target", "target", "any")),
    ],
}


@pytest.mark.parametrize(
    ("rule", "composition", "change", "complaint"),
    [
        pytest.param(rule, *mistake, id=f"{rule.__name__}-{mistake[-1]}")
        for rule, mistakes in MISTAKES.items()
        for mistake in mistakes
    ],
)
def test_a_rule_refuses_its_mistake(rule: Rule, composition: Composition, change: Change, complaint: str) -> None:
    objects = render(composition)
    change(objects)
    complaints = list(rule(objects))
    assert any(complaint in each for each in complaints), complaints


def test_every_rule_has_a_mistake_that_it_refuses() -> None:
    assert MISTAKES.keys() == {*pods.RULES, *wiring.RULES, *wiring.APPLIED_RULES, *network.RULES}


def test_schemas_refuse_unknown_fields_of_kubernetes_and_of_custom_kinds() -> None:
    objects = render(RANKS)
    container(objects, "draft")["lifecyle"] = {}
    ranks(objects, "worker")["containers"][0]["imagePull"] = "Always"
    group(objects)["sizes"] = 2
    errors = [error for thing in objects for error in core_errors(thing)]
    assert any("'lifecyle' was unexpected" in error for error in errors)
    assert any("'imagePull' was unexpected" in error for error in errors)
    (custom,) = of_kind(objects, "LeaderWorkerSet")
    assert is_custom(custom)
    assert any("'sizes' was unexpected" in error for error in outline_errors(custom))
