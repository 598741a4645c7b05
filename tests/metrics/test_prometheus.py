"""Prometheus itself reads what services expose, and answers every query; needs its `prometheus` and `promtool`."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.metrics.test_services import OTEL

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not shutil.which("prometheus") or not shutil.which("promtool"), reason="no Prometheus here"),
]


def test_rules_and_configuration_are_valid() -> None:
    for kind, name in (("rules", "alerts.yaml"), ("config", "prometheus.yaml")):
        done = subprocess.run(
            ["promtool", "check", kind, str(OTEL / name)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
