"""Manifests as the cluster gets them: rendered by kubectl, and what of them runs as pods."""

from __future__ import annotations

import os
import pickle
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tools.kubectl import kubectl

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "deploy" / "kubernetes"
OVERLAYS = tuple(
    f"overlays/{name}"
    for name in (
        "cpu-demo",
        "single-node-gpu",
        "production",
        "production/models",
        "ray",
        "ray/cluster",
        "ray/service",
        "vllm",
    )
)
Object = dict[str, Any]


@dataclass(frozen=True)
class Composition:
    """Manifests that are rendered together: a base, and components on it."""

    base: str
    components: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "+".join((self.base, *self.components))


COMPOSITIONS = (
    *map(Composition, OVERLAYS),
    Composition("base"),
    Composition("base/lws"),
    *(Composition("base", (name,)) for name in ("gpu-small", "gpu-large", "otel", "metrics", "tls", "networkpolicy")),
    Composition("base", ("metrics", "keda")),
    Composition("base", ("vllm-target", "gpu-small", "otel", "metrics", "networkpolicy")),
    Composition("base", ("vllm-target", "gpu-small", "tls")),
    Composition("base/lws", ("gpu-small", "otel", "metrics", "tls", "networkpolicy")),
    Composition("base", ("gpu-small", "gpu-large", "otel", "tls", "networkpolicy", "disaggregatedset")),
    Composition("overlays/single-node-gpu", ("networkpolicy", "disaggregatedset")),
)
NAMED_COMPONENTS = {name for composition in COMPOSITIONS for name in composition.components}


@dataclass(frozen=True)
class Workload:
    """Pods of one template. `role`: as their label says; `owner`: the whole object; `part`: what they are of it:
    leader, worker, a group's or a role's name; empty: all there is."""

    name: str
    role: str
    owner: Object
    template: Object
    part: str = ""

    @property
    def spec(self) -> Any:
        return self.template["spec"]

    @property
    def labels(self) -> Any:
        return self.template["metadata"]["labels"]

    @property
    def container(self) -> Any:
        """The one that serves; helpers come before it as init containers."""
        return self.spec["containers"][0]

    @property
    def containers(self) -> list[Object]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def is_vllm(self) -> bool:
        return self.role == "vllm"

    @property
    def serves(self) -> bool:
        """Whether a pod answers on its role's ports: ranks other than 0 do not, nor do helpers and Ray's nodes."""
        return self.role in ("draft", "target", "coordinator", "gateway") and self.part != "worker"


@cache
def _rendered(composition: Composition) -> bytes:
    return pickle.dumps([each for each in parse(_text_of(composition)) if each])


def _text_of(composition: Composition) -> str:
    if not composition.components:
        return _kustomize(MANIFESTS / composition.base)
    with tempfile.TemporaryDirectory() as folder:
        here = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "namespace": "paceline",
            "resources": [os.path.relpath(MANIFESTS / composition.base, folder)],
            "components": [os.path.relpath(MANIFESTS / "components" / n, folder) for n in composition.components],
        }
        (Path(folder) / "kustomization.yaml").write_text(yaml.safe_dump(here))
        return _kustomize(Path(folder))


def render(composition: Composition) -> list[Object]:
    """What `kubectl kustomize` prints; each time other objects, as callers may change them."""
    objects: list[Object] = pickle.loads(_rendered(composition))
    return objects


def parse(text: str) -> list[Any]:
    """The documents of a YAML stream; by libyaml where it is there, which is ten times as fast."""
    return list(yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def _kustomize(folder: Path) -> str:
    done = subprocess.run([str(kubectl()), "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [each for each in objects if each["kind"] in kinds]


def named(objects: list[Object], kind: str, name: str) -> Object:
    """The one object of that kind and name."""
    (found,) = (each for each in of_kind(objects, kind) if each["metadata"]["name"] == name)
    return found


def title(thing: Object) -> str:
    return f"{thing['kind']} {thing['metadata']['name']}"


def workloads(objects: list[Object]) -> list[Workload]:
    return [_workload(owner, part, template) for owner in objects for part, template in _templates(owner)]


def _workload(owner: Object, part: str, template: Object) -> Workload:
    role = template["metadata"]["labels"].get("app.kubernetes.io/component", "")
    return Workload(f"{title(owner)} {part}".strip(), role, owner, template, part)


def _templates(owner: Object) -> Iterator[tuple[str, Object]]:
    kind, spec = owner["kind"], owner.get("spec", {})
    if kind in ("Deployment", "Job"):
        yield "", spec["template"]
    elif kind == "LeaderWorkerSet":
        yield "leader", spec["leaderWorkerTemplate"]["leaderTemplate"]
        yield "worker", spec["leaderWorkerTemplate"]["workerTemplate"]
    elif kind == "DisaggregatedSet":
        yield from ((role["name"], role["spec"]["leaderWorkerTemplate"]["workerTemplate"]) for role in spec["roles"])
    elif kind in ("RayCluster", "RayService"):
        cluster = spec["rayClusterConfig"] if kind == "RayService" else spec
        yield "head", cluster["headGroupSpec"]["template"]
        yield from ((group["groupName"], group["template"]) for group in cluster["workerGroupSpecs"])


def matches(selector: Object, labels: dict[str, str]) -> bool:
    """Whether a label selector, of equalities and existence, selects these labels."""
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    terms = selector.get("matchExpressions", [])
    assert all(term["operator"] == "Exists" for term in terms), selector
    return wanted and all(term["key"] in labels for term in terms)
