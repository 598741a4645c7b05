"""`python -m tests.compat [HARNESS …]`: runs them one by one and writes `docs/reports/compat-DATE.md`.

What the day's report has of harnesses that are not run again stays in it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from paceline_lab import REPORTS
from paceline_lab.reporting.presentation import markdown_table
from paceline_lab.reporting.reports import describe, load_average, report_file, write_report
from tests.compat.acceptance import aiperf
from tests.compat.clients import official_clients
from tests.compat.evaluation import lm_eval
from tests.compat.frameworks import frameworks
from tests.compat.fuzzing import schemathesis
from tests.compat.harness import HarnessReport, NotInstalled
from tests.compat.load import k6
from tests.compat.vllm_client import vllm_bench_serve
from tests.compat.vllm_drafts import vllm_drafts
from tests.compat.vllm_v2 import vllm_v2

HARNESSES: Mapping[str, Callable[[], list[HarnessReport]]] = {
    "clients": official_clients,
    "frameworks": frameworks,
    "schemathesis": schemathesis,
    "k6": k6,
    "aiperf": aiperf,
    "lm-eval": lm_eval,
    "vllm bench serve": vllm_bench_serve,
    "vllm drafts": vllm_drafts,
    "vllm v2": vllm_v2,
}


def outcome(name: str) -> list[HarnessReport]:
    """Run one; what can't be installed was not run, what raises has failed."""
    try:
        return HARNESSES[name]()
    except NotInstalled as error:
        return [HarnessReport(name, "not run", {}, (), (f"not installed: {error}",))]
    except Exception as error:  # noqa: BLE001  # the others' reports are worth having
        return [HarnessReport(name, "failed", {}, (), (f"{type(error).__name__}: {error}",))]


def text(reports: Sequence[HarnessReport]) -> str:
    """The report's Markdown."""
    rows = [
        {
            "harness": each.harness,
            "outcome": each.outcome,
            "versions": ", ".join(f"{name} {version}" for name, version in each.versions.items()),
        }
        for each in reports
    ]
    details = "\n".join(
        f"## {each.harness}\n\n"
        + "".join(f"    {command}\n" for command in each.commands)
        + ("\n" if each.commands else "")
        + "".join(f"- {line}\n" for line in each.found)
        for each in reports
    )
    return f"# Compat\n\n{markdown_table(rows)}\n{details}"


def earlier(folder: Path, ran: Sequence[HarnessReport]) -> list[HarnessReport]:
    """What the day's report has of others."""
    file = report_file(folder, "compat", "json")
    results = json.loads(file.read_text())["results"] if file.exists() else []
    again = {each.harness for each in ran}
    return [HarnessReport(**each) for each in results if each["harness"] not in again]


def main() -> int:
    """Run and write; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("harnesses", nargs="*", metavar="HARNESS", help=f"Of {', '.join(HARNESSES)}; none: all.")
    parser.add_argument("--out", type=Path, default=REPORTS)
    arguments = parser.parse_args()
    if unknown := set(arguments.harnesses) - set(HARNESSES):
        parser.error(f"no such harness: {', '.join(sorted(unknown))}; there are {', '.join(HARNESSES)}")
    before = load_average()
    reports = [report for name in arguments.harnesses or HARNESSES for report in outcome(name)]
    ran = ", ".join(each.harness for each in reports)
    reports = [*earlier(arguments.out, reports), *reports]
    facts = describe() | {"harnesses of this run": ran} | {"load average": f"{before} before, {load_average()} after"}
    values = {"results": [asdict(each) for each in reports]}
    written = write_report(arguments.out, "compat", facts, values, text(reports))
    sys.stdout.write(written.read_text())
    return int(any(each.outcome == "failed" for each in reports))


if __name__ == "__main__":
    sys.exit(main())
