"""Every overlay and component renders, is valid for the cluster, and passes the rules that schemas can't state."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from paceline.runtime.metrics.catalogue import CATALOGUE
from tests.deploy import network_rules, pod_rules, schemas, wiring_rules
from tests.deploy.rendering import (
    COMPOSITIONS,
    MANIFESTS,
    NAMED_COMPONENTS,
    Composition,
    Object,
    matches,
    named,
    of_kind,
    parse,
    render,
    workloads,
)
from tests.docs.test_commands import check_paceline
from tests.metrics.scrape import selectors

Rule = Callable[[list[Object]], Iterator[str]]
RULES: tuple[Rule, ...] = (*pod_rules.RULES, *wiring_rules.RULES, *network_rules.RULES)


KINDS = sorted(file.stem for file in schemas.SCHEMAS.glob("*.yaml"))


IN_FULL = [Composition("base", (name,)) for name in ("gpu-small", "gpu-large", "otel", "metrics", "tls")]
"""Each of these stands in another composition, too."""


@pytest.mark.parametrize(
    "composition",
    [pytest.param(each, marks=pytest.mark.full if each in IN_FULL else ()) for each in COMPOSITIONS],
    ids=str,
)
def test_renderings_pass_every_rule_and_are_valid_at_the_newest_versions(composition: Composition) -> None:
    objects = render(composition)
    rules = (*RULES, *wiring_rules.APPLIED_RULES) if composition.base.startswith("overlays/") else RULES
    assert not [f"{rule.__name__}: {complaint}" for rule in rules for complaint in rule(objects)]
    assert not [error for thing in objects for error in schemas.core_errors(thing)]
    custom = [thing for thing in objects if schemas.is_custom(thing)]
    assert not [error for thing in custom for error in schemas.outline_errors(thing)]


@pytest.mark.parametrize("kind", KINDS)
def test_custom_objects_are_valid_by_the_published_schema(kind: str) -> None:
    if schemas.published(kind) is None:
        pytest.skip(f"no folder in PACELINE_CRDS has the definition of {kind}")
    objects = [thing for composition in COMPOSITIONS for thing in render(composition) if thing["kind"] == kind]
    assert objects
    assert not [error for thing in objects for error in schemas.published_errors(thing)]


def test_what_scales_a_role_is_a_metric_that_is_scraped() -> None:
    """The query's names and values of labels are of the catalogue (`tests/metrics` asks services that run)."""
    objects = render(Composition("base", ("metrics", "keda")))
    series = {f"{spec.exposed_name}{suffix}": spec for spec in CATALOGUE for suffix in ("", "_sum", "_count")}
    for role in ("target", "draft"):
        scaled = named(objects, "ScaledObject", f"paceline-{role}")
        chosen = [*selectors(scaled["spec"]["triggers"][0]["metadata"]["query"])]
        assert chosen
        for selector in chosen:
            listed = {label.exposed_name: label.values for label in series[selector.name].labels}
            assert all(value in listed[label] for label, _, value in selector.matchers)
    (monitor,) = of_kind(objects, "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for workload in workloads(objects):
        ports = {port["name"]: port["containerPort"] for port in workload.container["ports"]}
        assert ports[endpoint["port"]] == network_rules.METRICS_PORT
        assert matches(monitor["spec"]["selector"], workload.labels)


def test_ray_takes_what_the_overlay_gives_it() -> None:
    """The job's command line and the service's arguments are those of `paceline ray up`, and deploy the same."""
    job = of_kind(render(Composition("overlays/ray")), "RayJob")[0]["spec"]["entrypoint"]
    words = shlex.split(job)
    assert words[:3] == ["paceline", "ray", "up"]
    (application,) = parse(ray_service()["serveConfigV2"])[0]["applications"]
    given = {name: str(value) for name, value in application["args"].items()}
    flags = {f"--{name.replace('_', '-')}": value for name, value in given.items() if name != "model"}
    assert given["model"] == words[3]
    assert flags.items() <= dict(pairwise(words[4:])).items()
    check_paceline(words[1:])
    import_module("paceline_ray.settings").RaySettings(**application["args"])
    module, _, name = application["import_path"].partition(":")
    specification = find_spec(module)
    assert specification is not None
    assert specification.origin is not None
    assert f"\ndef {name}(" in Path(specification.origin).read_text(), "Serve's own packages need not be here"


def test_rays_large_nodes_have_a_gpu_for_each_rank() -> None:
    groups = ray_service()["rayClusterConfig"]["workerGroupSpecs"]
    gpus = {
        each["groupName"]: int(each["template"]["spec"]["containers"][0]["resources"]["limits"][pod_rules.GPU])
        for each in groups
    }
    (application,) = parse(ray_service()["serveConfigV2"])[0]["applications"]
    assert gpus["large"] == application["args"]["tensor_parallel_size"]
    assert application["args"]["drafts"] * application["args"]["draft_gpus"] <= gpus["small"]
    assert application["args"]["drain_seconds"] == pod_rules.RAY_DRAIN_SECONDS


def ray_service() -> Object:
    (service,) = of_kind(render(Composition("overlays/ray/service")), "RayService")
    spec: Object = service["spec"]
    return spec


def test_every_kustomization_is_rendered_and_says_what_it_is_for() -> None:
    files = sorted(MANIFESTS.rglob("kustomization.yaml"))
    for file in files:
        text = file.read_text()
        assert text.startswith("# "), f"{file} says nothing about itself"
        kind = yaml.safe_load(text)["kind"]
        name = str(file.parent.relative_to(MANIFESTS))
        if kind == "Component" and "/" not in name.removeprefix("components/"):
            assert name.removeprefix("components/") in NAMED_COMPONENTS, f"{name} is in no composition"
    overlays = {str(file.parent.relative_to(MANIFESTS)) for file in files if "overlays" in file.parts}
    rendered = {composition.base for composition in COMPOSITIONS}
    assert {name for name in overlays if not name.endswith("/copy")} <= rendered
