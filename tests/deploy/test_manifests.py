"""Every overlay and component renders, is valid for the cluster, and passes the rules that schemas can't state."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import yaml

from paceline.runtime.config import CoordinatorConfig
from tests.deploy import network_rules, pod_rules, schemas, wiring_rules
from tests.deploy.rendering import COMPOSITIONS, MANIFESTS, NAMED_COMPONENTS, Composition, Object, render

Rule = Callable[[list[Object]], Iterator[str]]
RULES: tuple[Rule, ...] = (*pod_rules.RULES, *wiring_rules.RULES, *network_rules.RULES)


KINDS = sorted(file.stem for file in schemas.SCHEMAS.glob("*.yaml"))


@pytest.mark.parametrize("composition", COMPOSITIONS, ids=str)
def test_renderings_pass_every_rule(composition: Composition) -> None:
    objects = render(composition)
    if "peer_certificate" not in CoordinatorConfig.model_fields and "--peer-certificate=" in str(objects):
        pytest.skip("this coordinator shows no certificate to its peers")
    rules = (*RULES, *wiring_rules.APPLIED_RULES) if composition.base.startswith("overlays/") else RULES
    assert not [f"{rule.__name__}: {complaint}" for rule in rules for complaint in rule(objects)]


@pytest.mark.parametrize("composition", COMPOSITIONS, ids=str)
def test_renderings_are_valid_at_the_newest_versions(composition: Composition) -> None:
    objects = render(composition)
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
