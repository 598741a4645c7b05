"""schemathesis on `/openapi.json`: right and wrong requests of every route, and no answer that its schema denies."""

from __future__ import annotations

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.compat.clients import python_versions
from tests.compat.harness import HarnessReport, http_url, python_environment, run, served

MODEL = "table:vocab=300,seed=1,max_length=64"
"""Short, so that a generated `max_tokens` ends soon."""
CASES = 10_000
SECONDS = 130
"""90 cases a second on two slow cores: 11,700 cases."""
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
RUN_S = 230.0


def schemathesis() -> list[HarnessReport]:
    """As many cases as asked for."""
    programs = python_environment("schemathesis", "schemathesis==4.32.0")
    with served(MODEL, drafter="none") as services, TemporaryDirectory() as folder:
        command = [
            *("run", f"{http_url(services)}/openapi.json", "--no-color", "--seed=1", "--continue-on-failure"),
            *(f"--checks={CHECKS}", f"--max-time={SECONDS}", "--generation-database=none", "--workers=2"),
            *("--phases=coverage,fuzzing", "--suppress-health-check=all", "--request-timeout=20"),
            *("--report=json", f"--report-json-path={Path(folder) / 'report.json'}"),
        ]
        said = run([programs / "schemathesis", *command], RUN_S)
        assert services.processes["gateway"].exit_code is None, "the gateway has ended"
        json.loads((Path(folder) / "report.json").read_text())
    cases = int(re.search(r"(\d+) generated", said)[1])  # type: ignore[index]
    assert cases >= CASES, f"{cases} cases alone\n{said[-1500:]}"
    shown = ["schemathesis " + " ".join(command[1:6])]
    return [HarnessReport("schemathesis", "passed", python_versions(programs), shown, [f"{cases} cases"])]
