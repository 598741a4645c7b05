"""What the manifests and images are checked and made with."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.deploy.rendering import ROOT
from tools import constraints
from tools.kubectl import checked, kubectl


def test_kubectl_is_the_pinned_one_and_another_wheel_is_refused() -> None:
    done = subprocess.run([str(kubectl()), "version", "--client"], capture_output=True, text=True, check=True)
    assert re.search(r"Client Version: v1\.\d+", done.stdout)
    with pytest.raises(ValueError, match=r"has sha256 .*, not "):
        checked(b"another wheel")


def test_constraints_follow_requirements_and_leave_builds_out() -> None:
    pinned = constraints.pinned()
    assert "pytest" in pinned, "CI installs what a release of another project can't change"
    assert {"torch", "transformers", "grpcio", "llguidance", "opentelemetry-sdk"} <= pinned.keys()
    assert "huggingface-hub" in pinned, "a requirement of a requirement"
    assert "paceline" not in pinned
    assert not {"pytest", "llguidance"} & constraints.pinned(extras=("otel",)).keys()
    assert not any("+" in version for version in pinned.values())


def test_folders_and_files_that_the_documents_apply_exist() -> None:
    text = "".join(file.read_text() for file in (ROOT / "deploy").rglob("*.md"))
    named = re.findall(r"(?:apply -k|-f) (deploy/\S+)", text)
    assert len(named) > 5
    assert not [path for path in named if not (ROOT / path).exists()]
