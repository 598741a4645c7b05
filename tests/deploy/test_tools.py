"""What the manifests and images are checked and made with."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.deploy.rendering import ROOT
from tools import constraints
from tools.kubectl import kubectl, verify_digest


def test_kubectl_is_the_pinned_one_and_another_wheel_is_refused() -> None:
    done = subprocess.run([str(kubectl()), "version", "--client"], capture_output=True, text=True, check=True)
    assert re.search(r"Client Version: v1\.\d+", done.stdout)
    with pytest.raises(ValueError, match=r"has sha256 .*, not "):
        verify_digest(b"another wheel")


def test_constraints_follow_requirements_and_leave_builds_out() -> None:
    versions = constraints.pinned_versions()
    assert "pytest" in versions, "CI installs what a release of another project can't change"
    assert {"torch", "transformers", "grpcio", "llguidance", "opentelemetry-sdk"} <= versions.keys()
    assert "huggingface-hub" in versions, "a requirement of a requirement"
    assert "paceline" not in versions
    assert not {"pytest", "llguidance"} & constraints.pinned_versions(extras=("otel",)).keys()
    assert not any("+" in version for version in versions.values())


def test_folders_and_files_that_the_documents_apply_exist() -> None:
    text = "".join(file.read_text() for file in (ROOT / "deploy").rglob("*.md"))
    named = re.findall(r"(?:apply -k|-f) (deploy/\S+)", text)
    assert len(named) > 5
    assert not [path for path in named if not (ROOT / path).exists()]
