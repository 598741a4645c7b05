"""Studies of clusters, each one command: `paceline simulate --study NAME`."""

from __future__ import annotations

from pathlib import Path

from paceline.protocol.errors import require
from paceline_lab.reporting.presentation import markdown_table
from paceline_lab.reporting.reports import describe, write_report
from paceline_lab.simulate.cluster_report import SIMULATED
from paceline_lab.simulate.studies import changes, drafts, zones
from paceline_lab.simulate.studies.parts import Study

STUDIES = {
    "drafts": drafts.study,
    "zones": zones.study,
    "changes": changes.study,
}
"""By name; each takes a seed."""


def run_studies(name: str, out: Path | None, seed: int) -> str:
    """Run a study, or `all`; returns its report, which is written where `out` says.

    Raises:
        InvalidInput: no study has the name.
    """
    known = f"all or one of {', '.join(STUDIES)}"
    require(name == "all" or name in STUDIES, "study", name, known)
    studies = STUDIES if name == "all" else {name: STUDIES[name]}
    return "\n".join(_report(make(seed), out, seed) for make in studies.values())


def _report(study: Study, out: Path | None, seed: int) -> str:
    text = f"# {study.question}\n\n{study.settings}\n\n{SIMULATED}\n{study.findings}\n{markdown_table(study.rows)}"
    if out is None:
        return text
    facts = describe() | {"seed": str(seed)} | dict(study.facts)
    values = {"rows": [dict(row) for row in study.rows]}
    return write_report(out, study.name, facts, values, text, study.plots).read_text()
