"""Prometheus itself reads what services expose, and answers every query; needs its `prometheus` and `promtool`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.runtime import metrics
from paceline.runtime.config import ServerSettings
from tests.e2e.cluster import eventually, free_port
from tests.metrics.conftest import Observed
from tests.metrics.test_services import OTEL, alert_queries, dashboard_queries

COMPARISON = re.compile(r"\s*(==|!=|>|<)\s*[\d.]+\s*$")
WINDOW = re.compile(r"\[[^\]]+\]")
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


def test_every_query_is_answered(observed: Observed, tmp_path: Path) -> None:
    gateway, own = free_port(), free_port()
    metrics.configure("paceline-gateway", ServerSettings(metrics_port=gateway), prometheus=True)
    ports = {**observed.ports, "gateway": gateway}
    jobs = [
        {"job_name": f"paceline-{name}", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
        for name, port in ports.items()
    ]
    (tmp_path / "prometheus.yaml").write_text(
        yaml.safe_dump({"global": {"scrape_interval": "1s"}, "scrape_configs": jobs})
    )
    command = [
        "prometheus",
        f"--config.file={tmp_path / 'prometheus.yaml'}",
        f"--storage.tsdb.path={tmp_path / 'db'}",
    ]
    log = (tmp_path / "log").open("w")
    process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{own}"], stdout=log, stderr=log)
    try:
        metrics.http_request_done("/v1/models", 200, 0.003)
        queries = [_without_threshold(query) for query in (*dashboard_queries(), *alert_queries())]
        unanswered: list[str] = queries

        def all_answered() -> bool:
            nonlocal unanswered
            unanswered = [query for query in unanswered if not _ask(own, query)]
            return not unanswered

        eventually(all_answered, "every query has data", timeout_s=60)
    finally:
        process.terminate()
        process.wait(30)
        log.close()
        metrics.shutdown()


def _without_threshold(query: str) -> str:
    """Over a window that the test can wait for, and whatever the values are."""
    return COMPARISON.sub("", WINDOW.sub("[4s]", query))


def _ask(port: int, query: str) -> list[Any]:
    parameters = urllib.parse.urlencode({"query": query})
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{parameters}", timeout=10) as answer:
            found: list[Any] = json.load(answer)["data"]["result"]
            return found
    except urllib.error.HTTPError as error:
        assert error.code == 503, f"{query}: {error.read().decode()}"
        return []
    except OSError:
        return []  # it isn't up yet
