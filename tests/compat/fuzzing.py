"""schemathesis on `/openapi.json`: right and wrong requests of every route, and no answer that its schema denies."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.compat.harness import CACHE, HarnessReport, http_url, python_environment, python_versions, served

MODEL = "table:vocab=300,seed=1,max_length=64"
"""Short, so that a generated `max_tokens` ends soon."""
CASES = 10_000
SECONDS = 300
"""90 cases a second on two slow cores, 50 where others work beside: 15,000 cases and more."""
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
RUN_S = 420.0


def schemathesis() -> list[HarnessReport]:
    """As many cases as fit; a failed run's requests, their answers and the services' logs are kept in `.compat`."""
    programs = python_environment("schemathesis", "schemathesis==4.32.0")
    folder = (CACHE / "schemathesis-run").absolute()
    folder.mkdir(exist_ok=True)
    with served(MODEL, drafter="none") as services:
        command = command_line(f"{http_url(services)}/openapi.json", folder / "report.json")
        called = [str(programs / "schemathesis"), *command]
        with (folder / "output.txt").open("w") as output:  # beside it: what schemathesis remembers of failures
            subprocess.run(called, stdout=output, stderr=output, timeout=RUN_S, check=False, cwd=folder)
        ended = services.processes["gateway"].exit_code
        for log in services.folder.glob("*.log"):
            shutil.copy(log, folder)
    lines = findings(json.loads((folder / "report.json").read_text()), ended)
    shown = f"schemathesis run URL/openapi.json --seed=1 --max-time={SECONDS}"
    outcome = "passed" if len(lines) == 1 else "failed"
    return [HarnessReport("schemathesis", outcome, python_versions(programs), [shown], lines)]


def command_line(address: str, report: Path) -> list[str]:
    """What is asked of schemathesis: nothing cut from what it prints, and no value hidden."""
    return [
        *("run", address, "--no-color", "--seed=1", "--continue-on-failure", "--workers=2"),
        *(f"--checks={CHECKS}", f"--max-time={SECONDS}", "--generation-database=none"),
        *("--phases=coverage,fuzzing", "--suppress-health-check=all", "--request-timeout=20"),
        *("--output-sanitize=false", "--output-truncate=false", "--report=json", f"--report-json-path={report}"),
    ]


def findings(report: Mapping[str, Any], gateway_exit_code: int | None) -> list[str]:
    """How many cases there were, and a line for each thing that is wrong."""
    cases = report["test_cases"]["generated"]
    lines = [f"{cases} cases"]
    if cases < CASES:
        lines.append(f"fewer than {CASES} cases")
    if gateway_exit_code is not None:
        lines.append(f"the gateway ended: exit code {gateway_exit_code}")
    return lines + [
        f"{each['title']} ({each['code']}), {each['count']} times: {', '.join(each['operations'])}"
        for each in report["failures"]
    ]
