"""Rules of what runs: security, resources, drain, disruption. Each yields what is wrong, naming the object."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from paceline.protocol.errors import PacelineError
from paceline.runtime.config import TargetConfig
from tests.deploy.rendering import Object, Workload, of_kind, workloads
from tests.deploy.settings import launcher_flags, server, settings

GPU = "nvidia.com/gpu"
UNWRITABLE = ("configMap", "secret", "projected")
SECRET_NAME = re.compile(r"token|secret|password|passwd|credential|(^|_)key$|api_?key", re.IGNORECASE)
RAY_DRAIN_SECONDS = 120
"""How long `paceline ray up` lets its actors drain; they know no `server.drain_seconds` of a file."""


def restricted(objects: list[Object]) -> Iterator[str]:
    """Pods meet the restricted Pod Security Standard, and write to volumes alone."""
    for workload in workloads(objects):
        pod = workload.spec.get("securityContext", {})
        if not (pod.get("runAsNonRoot") and pod.get("runAsUser") and pod.get("fsGroup")):
            yield f"{workload.name}: runs as root, or without a group for its volumes"
        if pod.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield f"{workload.name}: no RuntimeDefault seccomp profile"
        if any(workload.spec.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")):
            yield f"{workload.name}: shares a namespace of its node"
        if any("hostPath" in volume for volume in workload.spec["volumes"]):
            yield f"{workload.name}: mounts a path of its node"
        for container in workload.containers:
            yield from _restricted_container(f"{workload.name} {container['name']}", container)


def _restricted_container(name: str, container: Object) -> Iterator[str]:
    context = container.get("securityContext", {})
    if context.get("allowPrivilegeEscalation") is not False:
        yield f"{name}: may escalate its privileges"
    if context.get("readOnlyRootFilesystem") is not True:
        yield f"{name}: its root is writable"
    if context.get("capabilities") != {"drop": ["ALL"]}:
        yield f"{name}: keeps capabilities"


def writable_where_needed(objects: list[Object]) -> Iterator[str]:
    """With a read-only root, temporary files and the cache need volumes; every mount has its volume."""
    for workload in workloads(objects):
        volumes = {volume["name"]: volume for volume in workload.spec["volumes"]}
        for container in workload.containers:
            name = f"{workload.name} {container['name']}"
            mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
            for mount in mounts.values():
                if mount["name"] not in volumes:
                    yield f"{name}: no volume {mount['name']}"
            for path in ("/tmp", "/cache"):
                if not any(_writable(mounts[each], volumes) for each in mounts if each.startswith(path)):
                    yield f"{name}: nothing writable at {path}"


def _writable(mount: Object, volumes: dict[str, Any]) -> bool:
    return not mount.get("readOnly") and not any(kind in volumes.get(mount["name"], {}) for kind in UNWRITABLE)


def no_tokens(objects: list[Object]) -> Iterator[str]:
    """No pod talks to the cluster's API, and no service's address comes in as a variable."""
    accounts = {each["metadata"]["name"]: each for each in of_kind(objects, "ServiceAccount")}
    for workload in workloads(objects):
        account = accounts.get(workload.spec.get("serviceAccountName", ""))
        if account is None:
            yield f"{workload.name}: has no ServiceAccount of its own"
        elif account.get("automountServiceAccountToken") is not False:
            yield f"ServiceAccount {account['metadata']['name']}: mounts its token"
        if workload.spec.get("automountServiceAccountToken") is not False:
            yield f"{workload.name}: mounts a token"
        if workload.spec.get("enableServiceLinks") is not False:
            yield f"{workload.name}: gets variables of every Service, named like settings"


def no_secret_in_environment(objects: list[Object]) -> Iterator[str]:
    """Secrets are files: a variable is inherited, printed and dumped."""
    for workload in workloads(objects):
        for container in workload.containers:
            name = f"{workload.name} {container['name']}"
            if any("secretRef" in source for source in container.get("envFrom", [])):
                yield f"{name}: a Secret as environment"
            for variable in container.get("env", []):
                if "secretKeyRef" in variable.get("valueFrom", {}) or SECRET_NAME.search(variable["name"]):
                    yield f"{name}: {variable['name']} looks like a secret"


def requests_are_limits_on_gpus(objects: list[Object]) -> Iterator[str]:
    """A pod with a GPU is guaranteed what it has; every pod's memory is bounded."""
    for workload in workloads(objects):
        for container in workload.containers:
            resources = container.get("resources", {})
            requests, limits = resources.get("requests", {}), resources.get("limits", {})
            if not {"cpu", "memory"} <= requests.keys() or "memory" not in limits:
                yield f"{workload.name} {container['name']}: no requests, or memory without a limit"
            if GPU in {*requests, *limits} and requests != limits:
                yield f"{workload.name} {container['name']}: has a GPU, and requests {requests} with limits {limits}"


def gpus_are_the_degree(objects: list[Object]) -> Iterator[str]:
    """A target has as many GPUs as tensor-parallel ranks; a draft on GPUs has one."""
    for workload in workloads(objects):
        if not workload.serves:
            continue
        config = settings(workload, objects)
        gpus = int(workload.container["resources"].get("limits", {}).get(GPU, 0))
        if isinstance(config, TargetConfig):
            yield from _target_gpus(workload, config.tensor_parallel_size, gpus)
        elif gpus > (1 if workload.role == "draft" else 0):
            yield f"{workload.name}: {gpus} GPUs, where the {workload.role} uses none or one"


def _target_gpus(workload: Workload, degree: int, gpus: int) -> Iterator[str]:
    flags = launcher_flags(workload)
    if flags:
        pods = workload.owner["spec"]["leaderWorkerTemplate"]["size"]
        if int(flags["nproc-per-node"]) != gpus:
            yield f"{workload.name}: {flags['nproc-per-node']} ranks on {gpus} GPUs"
        gpus *= pods
    if gpus != degree and (gpus, degree) != (0, 1):
        yield f"{workload.name}: tensor_parallel_size {degree} on {gpus} GPUs"


def time_to_drain(objects: list[Object]) -> Iterator[str]:
    """The grace period holds preStop and drain; ranks outlive the sessions of rank 0."""
    for workload in workloads(objects):
        if workload.owner["kind"] == "Job":
            continue
        try:
            drain = server(workload, objects).drain_seconds if workload.serves else 0.0
        except (PacelineError, LookupError) as error:
            yield f"{workload.name}: {error}"
            continue
        if workload.role == "ray":
            drain = RAY_DRAIN_SECONDS
        wait, grace = _waits(workload), workload.spec.get("terminationGracePeriodSeconds", 30)
        if wait < 15:
            yield f"{workload.name}: preStop of {wait} s; addresses take 15 s to go"
        if grace <= wait + drain:
            yield f"{workload.name}: {grace} s of grace for {wait} s of preStop and {drain:g} s of drain"
        yield from _ranks_outlive(workload, wait, drain)


def _waits(workload: Workload) -> int:
    hook = workload.container.get("lifecycle", {}).get("preStop", {})
    return int(hook.get("sleep", {}).get("seconds", 0))


def _ranks_outlive(workload: Workload, wait: int, drain: float) -> Iterator[str]:
    flags = launcher_flags(workload)
    if workload.part != "leader":
        return
    if int(flags.get("shutdown-timeout", 30)) <= drain:
        yield f"{workload.name}: torchrun ends rank 0 before it has drained for {drain:g} s"
    (worker,) = (each for each in workloads([workload.owner]) if each.part == "worker")
    if _waits(worker) < wait + drain:
        yield f"{worker.name}: stops {_waits(worker)} s after it is told, while rank 0 drains for {drain:g} s"


def disruption_budgets(objects: list[Object]) -> Iterator[str]:
    """Every role that serves has a budget that selects its pods."""
    budgets = [each["spec"]["selector"]["matchLabels"] for each in of_kind(objects, "PodDisruptionBudget")]
    for workload in workloads(objects):
        if workload.owner["kind"] != "Job" and not any(one.items() <= workload.labels.items() for one in budgets):
            yield f"{workload.name}: no PodDisruptionBudget"


def apart(objects: list[Object]) -> Iterator[str]:
    """Replicas of a role keep apart: anti-affinity on the node, spread over a topology."""
    for workload in workloads(objects):
        if not workload.serves:
            continue
        terms = workload.spec.get("affinity", {}).get("podAntiAffinity", {})
        if not terms:
            yield f"{workload.name}: no anti-affinity"
        if not workload.spec.get("topologySpreadConstraints"):
            yield f"{workload.name}: no topology spread"


RULES = (
    restricted,
    writable_where_needed,
    no_tokens,
    no_secret_in_environment,
    requests_are_limits_on_gpus,
    gpus_are_the_degree,
    time_to_drain,
    disruption_budgets,
    apart,
)
