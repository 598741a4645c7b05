"""Rules of how objects name each other: selectors, ports, probes, settings, references. Each yields what is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any

import numba
from opentelemetry.sdk import environment_variables as otel_variables
from pydantic import ValidationError

from paceline.drafting.client import DraftClientSettings
from paceline.protocol.errors import PacelineError
from paceline.runtime.config import CoordinatorConfig, DraftConfig, PoolSettings
from paceline.runtime.gateway_config import GatewayConfig
from paceline_vllm import DraftProposer
from tests.deploy.rendering import Object, Workload, matches, of_kind, title, workloads
from tests.deploy.settings import KINDS, SERVICES, Config, server, settings

CLUSTER_KINDS = ("Namespace", "PriorityClass")
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
PATHS = {"startupProbe": "/ping", "readinessProbe": "/health", "livenessProbe": "/ping"}
"""What the gateway's ask: only requests need a target. A gateway without one is not started anew."""
ADDRESS = re.compile(r"dns:///([\w-]+):(\d+)")
FROM_ELSEWHERE = {
    "PersistentVolumeClaim": {"paceline-models"},
    "Secret": {"paceline-api-keys", *(f"paceline-{role}-tls" for role in KINDS)},
}
"""What production expects to be there before it is applied."""
HELPERS = {"POD_NAME", "LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"}
"""Read by nobody but other variables and arguments of the manifest."""
LIBRARIES = {"HF_HUB_OFFLINE", "HF_HOME", "HOME", "RAY_USAGE_STATS_ENABLED", "USER"}


def selectors_match(objects: list[Object]) -> Iterator[str]:
    """What selects pods selects some, and a controller its own."""
    pods = [workload.labels for workload in workloads(objects)]
    for each in objects:
        for selector in _selectors(each):
            if not any(matches(selector, labels) for labels in pods):
                yield f"{title(each)}: selects no pod by {selector}"
    for workload in workloads(objects):
        selector = workload.owner["spec"].get("selector")
        if selector and not matches(selector, workload.labels):
            yield f"{workload.name}: does not select its own pods"
        for constraint in workload.spec.get("topologySpreadConstraints", []):
            if not matches(constraint["labelSelector"], workload.labels):
                yield f"{workload.name}: spreads other pods than its own"
        for term in _anti_affinity(workload):
            if not matches(term["labelSelector"], workload.labels):
                yield f"{workload.name}: keeps apart from other pods than its own"


def _selectors(each: Object) -> Iterator[Object]:
    spec = each.get("spec", {})
    if each["kind"] == "Service":
        yield {"matchLabels": spec["selector"]}
    elif each["kind"] == "PodDisruptionBudget":
        yield spec["selector"]


def _anti_affinity(workload: Workload) -> Iterator[Object]:
    terms = workload.spec.get("affinity", {}).get("podAntiAffinity", {})
    yield from terms.get("requiredDuringSchedulingIgnoredDuringExecution", [])
    preferred = terms.get("preferredDuringSchedulingIgnoredDuringExecution", [])
    yield from (each["podAffinityTerm"] for each in preferred)


def settings_load(objects: list[Object]) -> Iterator[str]:
    """Each service accepts its flags, its file and its environment, and they agree about the model."""
    models: dict[str, str | None] = {}
    for workload in workloads(objects):
        if not workload.serves:
            continue
        try:
            config = settings(workload, objects)
        except (PacelineError, LookupError) as error:
            yield f"{workload.name}: {error}"
            continue
        models[workload.name] = config.target_model if isinstance(config, DraftConfig) else config.model
    if len(set(models.values())) > 1:
        yield f"models differ: {models}"


def environment_is_known(objects: list[Object]) -> Iterator[str]:
    """Every variable has a reader: Paceline's settings, OpenTelemetry's, or a library that the documents name."""
    for workload in workloads(objects):
        for container in workload.containers:
            for variable in container.get("env", []):
                if not _is_read(variable["name"]):
                    yield f"{workload.name}: nothing reads {variable['name']}"


def _is_read(name: str) -> bool:
    if name.startswith("OTEL_"):
        return name in vars(otel_variables).values() or name in ("OTEL_TRACES_EXPORTER", "OTEL_METRICS_EXPORTER")
    if name.startswith("NUMBA_"):
        return hasattr(numba.config, name.removeprefix("NUMBA_"))
    return name in HELPERS | LIBRARIES | {"PACELINE_HOME"}


def ports_agree(objects: list[Object]) -> Iterator[str]:
    """A container's ports are those that its settings listen on, and so are its Service's; it listens for others."""
    for workload in workloads(objects):
        if not workload.serves:
            continue
        listens = server(workload, objects)
        ports = {port["name"]: port["containerPort"] for port in workload.container["ports"]}
        own = "http" if workload.role == "gateway" else "grpc"
        expected = {own: listens.port, "health": listens.health_port, "metrics": listens.metrics_port}
        if any(ports.get(name) != port for name, port in expected.items()):
            yield f"{workload.name}: has ports {ports} and settings {expected}"
        if listens.host not in ("0.0.0.0", "::"):
            yield f"{workload.name}: listens on {listens.host} alone"
        for service in of_kind(objects, "Service"):
            if matches({"matchLabels": service["spec"]["selector"]}, workload.labels):
                yield from _service_ports(service, workload, expected)


def _service_ports(service: Object, workload: Workload, expected: dict[str, int | None]) -> Iterator[str]:
    if workload.role == "gateway":
        if service["spec"].get("clusterIP") == "None":
            yield f"{title(service)}: is headless, and HTTP clients choose no pod"
    elif service["spec"].get("clusterIP") != "None":
        yield f"{title(service)}: is not headless"
    for port in service["spec"]["ports"]:
        if expected.get(port["targetPort"]) != port["port"]:
            yield f"{title(service)}: port {port} where {workload.name} listens on {expected}"


def services_select_who_serves(objects: list[Object]) -> Iterator[str]:
    """Behind a Service are pods that listen, no helpers and no other ranks."""
    for service in of_kind(objects, "Service"):
        for workload in workloads(objects):
            is_heard = workload.serves or workload.is_vllm
            if matches({"matchLabels": service["spec"]["selector"]}, workload.labels) and not is_heard:
                yield f"{title(service)}: selects {workload.name}, which does not listen"


def peers_are_services(objects: list[Object]) -> Iterator[str]:
    """The coordinator and the gateway name Services of the right role, on their ports, resolved anew."""
    services = {each["metadata"]["name"]: each["spec"] for each in of_kind(objects, "Service")}
    for workload in workloads(objects):
        if not workload.serves:
            continue
        for role, peer in _peers(settings(workload, objects)):
            yield from _peer(workload, role, "none" if peer is None else str(peer.address), services)


def _peers(config: Config) -> Iterator[tuple[str, PoolSettings | None]]:
    if isinstance(config, CoordinatorConfig):
        yield "target", config.target
        yield "draft", config.draft
    elif isinstance(config, GatewayConfig):
        yield "coordinator", config.coordinator


def _peer(workload: Workload, role: str, address: str, services: dict[str, Any]) -> Iterator[str]:
    found = ADDRESS.search(address)
    service = services.get(found[1]) if found else None
    if found is None or service is None:
        yield f"{workload.name}: {role} at {address}, which is no Service"
        return
    if service["selector"].get("app.kubernetes.io/component") != role:
        yield f"{workload.name}: {role} at {address}, a Service of others"
    if int(found[2]) not in [port["port"] for port in service["ports"]]:
        yield f"{workload.name}: {role} at {address}, a port that it has not"


def vllm_has_its_drafts(objects: list[Object]) -> Iterator[str]:
    """A vLLM server asks a Service of drafts, which draft for its model."""
    services = {each["metadata"]["name"]: each["spec"] for each in of_kind(objects, "Service")}
    drafts = [settings(each, objects) for each in workloads(objects) if each.role == "draft"]
    for workload in workloads(objects):
        if not workload.is_vllm:
            continue
        model, *flags = workload.container["args"]
        values = dict(flag.removeprefix("--").split("=", 1) for flag in flags)
        speculation = json.loads(values["speculative-config"])
        if speculation["model"] != f"{DraftProposer.__module__.partition('.')[0]}.{DraftProposer.__name__}":
            yield f"{workload.name}: {speculation['model']} is no proposer of ours"
        try:
            asked = vllm_settings(values).draft
        except ValidationError as error:
            yield f"{workload.name}: {error}"
            continue
        yield from _peer(workload, "draft", str(asked.address), services)
        for draft in drafts:
            if isinstance(draft, DraftConfig) and draft.target_model != model:
                yield f"{workload.name}: serves {model}, and the draft is for {draft.target_model}"
            if bool(asked.tls_ca and asked.tls_certificate and asked.tls_key) != bool(draft.server.tls_client_ca):
                yield f"{workload.name}: mutual TLS to the draft at one end alone"


def vllm_settings(values: Mapping[str, str]) -> DraftClientSettings:
    """What flags such as `--additional-config.paceline.draft.address` say; vLLM takes them, or one JSON, not both.

    Raises:
        ValidationError: naming the setting that is wrong.
    """
    section: dict[str, Any] = {}
    for name, value in values.items():
        if name.startswith("additional-config.paceline."):
            *outer, last = name.split(".")[2:]
            reduce(lambda inner, key: inner.setdefault(key, {}), outer, section)[last] = value
    return DraftClientSettings.model_validate(section)


def probes_ask_real_services(objects: list[Object]) -> Iterator[str]:
    """Probes ask the health port about the service that the process registers; the gateway's its own port by HTTP."""
    for workload in workloads(objects):
        if not workload.serves:
            continue
        for name in PROBES:
            by, expected = _probe(name, workload, objects)
            asks = workload.container.get(name, {}).get(by)
            if asks != expected:
                yield f"{workload.name}: {name} asks {asks} instead of {expected}"
        liveness = workload.container.get("livenessProbe", {})
        if liveness.get("periodSeconds", 10) * liveness.get("failureThreshold", 3) < 60:
            yield f"{workload.name}: its liveness gives up within a minute"


def _probe(name: str, workload: Workload, objects: list[Object]) -> tuple[str, dict[str, Any]]:
    listens = server(workload, objects)
    if workload.role == "gateway":
        return "httpGet", {"path": PATHS[name], "port": listens.port}
    return "grpc", {"port": listens.health_port, "service": SERVICES[workload.role]}


def tls_is_the_edges(objects: list[Object]) -> Iterator[str]:
    """Where the coordinators demand certificates, who talks to them shows one, and checks theirs; and so on."""
    configs = {each.role: settings(each, objects) for each in workloads(objects) if each.serves}
    for source, destination in (("gateway", "coordinator"), ("coordinator", "target"), ("coordinator", "draft")):
        caller, called = configs.get(source), configs.get(destination)
        if not isinstance(caller, CoordinatorConfig | GatewayConfig) or called is None:
            continue
        shows = bool(caller.peer_ca and caller.peer_certificate and caller.peer_key)
        if shows != (called.server.tls_client_ca is not None):
            yield f"{source}: mutual TLS to the {destination} at one end alone"


def references_exist(objects: list[Object]) -> Iterator[str]:
    """What a pod or an autoscaler names is in the same rendering."""
    known = {(each["kind"], each["metadata"]["name"]) for each in objects}
    known |= {(kind, name) for kind, names in FROM_ELSEWHERE.items() for name in names}
    for owner, kind, name in _references(objects):
        if (kind, name) not in known:
            yield f"{owner}: names {kind} {name}, which is not there"
    spaces = {each["metadata"].get("namespace") for each in objects if each["kind"] not in CLUSTER_KINDS}
    if len(spaces) != 1 or None in spaces:
        yield f"objects are in several namespaces: {spaces}"


def _references(objects: list[Object]) -> Iterator[tuple[str, str, str]]:
    for workload in workloads(objects):
        if "priorityClassName" in workload.spec:
            yield workload.name, "PriorityClass", workload.spec["priorityClassName"]
        for volume in workload.spec["volumes"]:
            if "configMap" in volume:
                yield workload.name, "ConfigMap", volume["configMap"]["name"]
            if "secret" in volume:
                yield workload.name, "Secret", volume["secret"]["secretName"]
            if "persistentVolumeClaim" in volume:
                yield workload.name, "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]
    for each in of_kind(objects, "HorizontalPodAutoscaler", "ScaledObject"):
        target = each["spec"]["scaleTargetRef"]
        yield title(each), target["kind"], target["name"]
    for job in of_kind(objects, "RayJob"):
        yield title(job), "RayCluster", job["spec"]["clusterSelector"]["ray.io/cluster"]


def autoscalers_own_the_replicas(objects: list[Object]) -> Iterator[str]:
    """Applying the manifests again does not undo what an autoscaler has decided."""
    for each in of_kind(objects, "HorizontalPodAutoscaler", "ScaledObject"):
        target = each["spec"]["scaleTargetRef"]
        for owner in of_kind(objects, target["kind"]):
            if owner["metadata"]["name"] == target["name"] and "replicas" in owner["spec"]:
                yield f"{title(owner)}: sets replicas, which {title(each)} does"


def images_are_pinned(objects: list[Object]) -> Iterator[str]:
    """Images have a registry and a version, in whatever an operator applies."""
    for workload in workloads(objects):
        for container in workload.containers:
            image, _, tag = container["image"].rpartition(":")
            if "/" not in image or tag in ("", "latest"):
                yield f"{workload.name} {container['name']}: image {container['image']} is not pinned"


RULES = (
    selectors_match,
    settings_load,
    environment_is_known,
    ports_agree,
    services_select_who_serves,
    peers_are_services,
    vllm_has_its_drafts,
    probes_ask_real_services,
    tls_is_the_edges,
    references_exist,
    autoscalers_own_the_replicas,
)
APPLIED_RULES = (images_are_pinned,)
"""Of overlays, which are applied; a base has names of images for them to fill in."""
