"""Objects against schemas: Kubernetes' own at its three newest minor versions, and those of custom kinds.

Of each custom kind, `tests/deploy/schemas/` describes the part that our manifests use; its pod templates
are checked as Pods of Kubernetes. Where `PACELINE_CRDS` names folders with the projects' published
CustomResourceDefinitions, whole objects are checked against those, too.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from jsonschema import Draft202012Validator
from kubernetes_validate import utils

from tests.deploy.rendering import Object, parse, title, workloads

SCHEMAS = Path(__file__).parent / "schemas"
MINORS = tuple(
    sorted({utils.major_minor(each) for each in utils.all_versions()}, key=lambda v: int(v.split(".")[1]))
)[-3:]
"""The newest that the library has."""


def is_custom(thing: Object) -> bool:
    """Whether a controller that is installed by itself defines the kind."""
    return (SCHEMAS / f"{thing['kind']}.yaml").exists()


def core_errors(thing: Object) -> list[str]:
    """What is wrong with an object, or with the pod templates of a custom one, at any of the versions."""
    if not is_custom(thing):
        return _errors(json.dumps(thing, sort_keys=True), title(thing))
    pods = [{"apiVersion": "v1", "kind": "Pod", **each.template} for each in workloads([thing])]
    return [error for pod in pods for error in _errors(json.dumps(pod, sort_keys=True), title(thing))]


@cache
def _errors(text: str, name: str) -> list[str]:
    found = []
    for minor in MINORS:
        try:
            kubernetes_validate.validate(json.loads(text), minor, strict=True)
        except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
            found.append(f"{name}, Kubernetes {minor}: {error.message}")
    return found


def outline_errors(thing: Object) -> list[str]:
    """What a custom object has that our description of its kind has not."""
    schema = yaml.safe_load((SCHEMAS / f"{thing['kind']}.yaml").read_text())
    return _violations(Draft202012Validator(schema), thing)


@cache
def published(kind: str) -> Draft202012Validator | None:
    """The kind's published schema, closed; None: no folder in PACELINE_CRDS has it."""
    for definition in _definitions():
        if definition["spec"]["names"]["kind"] == kind:
            version = next(each for each in definition["spec"]["versions"] if each["storage"])
            schema: dict[str, Any] = _closed(version["schema"]["openAPIV3Schema"])
            # Kubernetes itself defines these three.
            schema["properties"] |= {"apiVersion": {}, "kind": {}, "metadata": {}}
            return Draft202012Validator(schema)
    return None


def published_errors(thing: Object) -> list[str]:
    """What is wrong with a custom object by its published schema; rules in CEL are not run."""
    validator = published(thing["kind"])
    assert validator is not None
    return _violations(validator, thing)


def _violations(validator: Draft202012Validator, thing: Object) -> list[str]:
    return [f"{title(thing)}: {error.json_path}: {error.message}" for error in validator.iter_errors(thing)]


@cache
def _definitions() -> tuple[dict[str, Any], ...]:
    folders = [Path(each) for each in os.environ.get("PACELINE_CRDS", "").split(os.pathsep) if each]
    files = [file for folder in folders for file in sorted(folder.rglob("*.yaml"))]
    documents = [each for file in files for each in parse(file.read_text())]
    return tuple(each for each in documents if each and each["kind"] == "CustomResourceDefinition")


def _closed(schema: Any) -> Any:
    """An unknown field is refused, as a strict cluster does; an int-or-string takes both."""
    if not isinstance(schema, dict):
        return [_closed(each) for each in schema] if isinstance(schema, list) else schema
    closed = {name: _closed(value) for name, value in schema.items()}
    is_object = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    if is_object and not schema.get("x-kubernetes-preserve-unknown-fields"):
        closed.setdefault("additionalProperties", False)
    return closed
