"""A dangling citation of each kind is found; `make check` looks for them in this checkout."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.check_citations import ROOT, dangling_citations

MATHEMATICS = "# Exactness\n\n## 1. Rules\n\n### 1a. Coupled acceptance\n\nSee §1.\n"
DECISION = "2026-11-21-one-loop"
TREE = {
    "docs/exactness.md": MATHEMATICS,
    f"docs/decisions/{DECISION}.md": "# One loop\n\n## What, and why?\n",
    "README.md": f"[why](docs/decisions/{DECISION}.md#what-and-why), [us](#paceline)\n\n# Paceline\n",
    "paceline/loop.py": f"# `exactness` §1a, decision `{DECISION}`, docs/exactness.md, a span named paceline/round\n",
    "protos/paceline/v1/types.proto": "// `exactness` §1.\n",
    "tests/test_loop.py": '"""`python -m paceline.loop`, twice."""\n',
}
EXACT = {
    *("Rounds", "BlockRounds", "DiscardedTokenChoosesK", "KeepThenStop", "ProcessedRounds", "ProcessedBlockRounds"),
    *("Runs", "PrefetchedRounds", "SeamedSession", "MisreportsQ", "MisreportsQToBlock", "PeeksWithItsKey"),
}
"""Classes of the mutants' test that are no mutants."""


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_nothing_dangles_in_a_tree_of_every_kind_of_citation(tmp_path: Path) -> None:
    assert dangling_citations(plant(tmp_path, TREE)) == []


@pytest.mark.parametrize(
    ("file", "line", "found"),
    [
        ("paceline/loop.py", "# `exactness` §2", "no section §2 in docs/exactness.md"),
        ("paceline/loop.py", "# `exactness`\n# §1d", "no section §1d in docs/exactness.md"),
        ("protos/paceline/v1/types.proto", "// exactness §1b", "no section §1b in docs/exactness.md"),
        ("docs/exactness.md", "as in §9", "no section §9 in docs/exactness.md"),
        ("paceline/loop.py", "# decision `2026-11-21-two-loops`", "no decision 2026-11-21-two-loops"),
        ("docs/exactness.md", f"decision `{DECISION}-again`", f"no decision {DECISION}-again"),
        ("paceline/loop.py", "# see docs/gone.md", "no file docs/gone.md"),
        ("paceline/loop.py", "# held by tests/test_gone.py", "no file tests/test_gone.py"),
        ("README.md", "`paceline/gone.py`", "no file paceline/gone.py"),
        ("README.md", "python -m paceline.gone --out x", "no module paceline.gone to run"),
        ("README.md", "[gone](docs/gone.md)", "no file docs/gone.md"),
        (f"docs/decisions/{DECISION}.md", "[gone](exactness.md)", "no file exactness.md"),
        ("README.md", "[what](docs/exactness.md#rules)", "no heading #rules in docs/exactness.md"),
        ("README.md", "[what](#gone)", "no heading #gone in README.md"),
    ],
)
def test_a_dangling_citation_is_found(tmp_path: Path, file: str, line: str, found: str) -> None:
    root = plant(tmp_path, TREE)
    with (root / file).open("a", encoding="utf-8") as appended:
        appended.write(f"\n{line}\n")
    dangling = dangling_citations(root)
    assert dangling
    assert all(each.startswith(f"{file}:") and each.endswith(found) for each in dangling)


def test_reports_cite_what_their_day_had(tmp_path: Path) -> None:
    report = "- command: python -m paceline_lab.gone\n\n`exactness` §77\n"
    assert dangling_citations(plant(tmp_path, TREE | {"docs/reports/speed.md": report})) == []


def test_every_mutant_is_in_the_table_of_variants_that_break_exactness() -> None:
    _, table = (ROOT / "docs/exactness.md").read_text(encoding="utf-8").split("\n## 9. ")
    named = set(re.findall(r"`([A-Z]\w+)`", table))
    used = (ROOT / "tests/mutants/test_mutants.py").read_text(encoding="utf-8")
    mutants = set(re.findall(r"\b(?:mutants|processed|runs|prefetches|untrusted)\.([A-Z][a-z]\w+)", used)) - EXACT
    assert named - EXACT == mutants


@pytest.mark.parametrize("folder", ["decisions", "reports"])
def test_every_record_is_in_its_folders_index(folder: str) -> None:
    index = (ROOT / "docs" / folder / "README.md").read_text(encoding="utf-8")
    records = {path.name for path in (ROOT / "docs" / folder).glob("*.md")} - {"README.md"}
    assert records == set(re.findall(r"\]\(([^()/]+\.md)\)", index))
