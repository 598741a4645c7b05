"""Check the citations of code and documents: exit 1 and name each one that leads nowhere.

The checks leave out reports, which are records of their day:

- a section of `exactness` names a numbered heading of docs/exactness.md, in that file as in others;
- a decision's name (date and slug) names a file of docs/decisions;
- a path below docs/, tests/, protos/ or a package of ours exists, and so does the module of a `python -m`
  (in code, a package's path without an ending may be anything, a span's name for one);
- a relative link of a Markdown document leads to a file and, if it names one, to a heading of it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from tools.structure import PACKAGES as PRODUCT

ROOT = Path(__file__).resolve().parent.parent
EXACTNESS = Path("docs/exactness.md")
DECISIONS = Path("docs/decisions")
REPORTS = Path("docs/reports")
PROTOS = Path("protos")
PACKAGES = (*PRODUCT, "tests")
STUBS = Path("paceline/v1")
DOCUMENTS = ("README.md", "CONTRIBUTING.md")
OTHERS = ("Makefile", "pyproject.toml")
DATE = "DATE"
"""Stands for a date in the pattern of a path."""
OWN_TEST = Path("tests/test_citations.py")
"""The check's own test, whose citations lead nowhere."""

_SECTION = re.compile(r"exactness`?(?:\.md)?(?:\s|#|//)+§\s?(\w+)")
_OWN_SECTION = re.compile(r"§\s?(\w+)")
_NUMBERED_HEADING = re.compile(r"^#+ (\d+[a-z]?)\. ", re.MULTILINE)
_DECISION = re.compile(r"\b\d{4}-\d\d-\d\d-[a-z][a-z0-9-]*[a-z0-9]\b")
_PATH = re.compile(rf"(?<![\w./-])(?:(?:docs|protos|{'|'.join(PACKAGES)})/[\w.-]+(?:/[\w.-]+)*)")
_MODULE = re.compile(rf"python3? -m ((?:{'|'.join(PACKAGES)})\b(?:\.\w+)*)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


def dangling_citations(root: Path) -> list[str]:
    """Citations of things that don't exist, as `file:line: what`."""
    documents = sorted(_documents(root))
    return list(chain(_dangling_citations(root, documents), _dangling_links(root, documents)))


def main() -> int:
    """Run the check on this checkout."""
    dangling = dangling_citations(ROOT)
    for line in dangling:
        sys.stderr.write(f"{line}\n")
    return 1 if dangling else 0


def _dangling_citations(root: Path, documents: Iterable[Path]) -> Iterator[str]:
    sections = set(_NUMBERED_HEADING.findall(_read_text(root / EXACTNESS)))
    decisions = {path.stem for path in (root / DECISIONS).glob("*.md")}
    for file in chain(documents, sorted(_sources(root))):
        if file.is_relative_to(REPORTS):
            continue
        text = _read_text(root / file)
        for match in (_OWN_SECTION if file == EXACTNESS else _SECTION).finditer(text):
            if match[1] not in sections:
                yield _at(file, text, match, f"no section §{match[1]} in {EXACTNESS}")
        for match in _DECISION.finditer(text):
            if match[0] not in decisions:
                yield _at(file, text, match, f"no decision {match[0]}")
        yield from _dangling_paths(root, file, text)


def _dangling_paths(root: Path, file: Path, text: str) -> Iterator[str]:
    for match in _PATH.finditer(text):
        path = match[0].rstrip(".")
        if _is_path(file, path) and not any((base / path).exists() for base in (root, root / PROTOS)):
            yield _at(file, text, match, f"no file {path}")
    for match in _MODULE.finditer(text):
        module = Path(*match[1].split("."))
        if not (root / module).with_suffix(".py").exists() and not (root / module / "__main__.py").exists():
            yield _at(file, text, match, f"no module {match[1]} to run")


def _is_path(file: Path, citation: str) -> bool:
    certain = file.suffix == ".md" or citation.startswith(("docs/", "tests/")) or "." in Path(citation).name
    return certain and DATE not in citation


def _dangling_links(root: Path, documents: Iterable[Path]) -> Iterator[str]:
    for file in documents:
        text = _without_code(_read_text(root / file))
        for match in _LINK.finditer(text):
            path, _, anchor = match[1].partition("#")
            if "://" in path or path.startswith("mailto:"):
                continue
            target = (root / file).parent / path if path else root / file
            if not target.exists():
                yield _at(file, text, match, f"no file {path}")
            elif anchor and target.suffix == ".md" and anchor not in _anchors(_read_text(target)):
                yield _at(file, text, match, f"no heading #{anchor} in {path or file}")


def _documents(root: Path) -> Iterator[Path]:
    yield from (Path(name) for name in DOCUMENTS if (root / name).exists())
    for folder in ("docs", "deploy"):
        yield from (path.relative_to(root) for path in (root / folder).rglob("*.md"))


def _sources(root: Path) -> Iterator[Path]:
    """Every file that a person writes, but documents."""
    yield from (Path(name) for name in OTHERS if (root / name).exists())
    files = [*(root / PROTOS).rglob("*.proto"), *chain(*((root / name).rglob("*.py") for name in PACKAGES))]
    paths = (path.relative_to(root) for path in files)
    yield from (path for path in paths if not path.is_relative_to(STUBS) and path != OWN_TEST)


def _anchors(text: str) -> set[str]:
    """The anchors that GitHub gives a document's headings: equal ones are numbered from the second on."""
    anchors: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        number = 0
        while (anchor := f"{slug}-{number}" if number else slug) in anchors:
            number += 1
        anchors.add(anchor)
    return anchors


def _without_code(text: str) -> str:
    """The same lines without quoted code."""
    fenceless = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    return _CODE.sub("", fenceless)


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _at(file: Path, text: str, match: re.Match[str], what: str) -> str:
    line = text.count("\n", 0, match.start()) + 1
    return f"{file}:{line}: {what}"


if __name__ == "__main__":
    sys.exit(main())
