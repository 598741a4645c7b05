"""Tables and pictures of documents are those of the settings, constants, manifests and runs that they show."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from paceline.drafters.layers.manifest import load_manifest
from paceline.models.resolve import is_draft
from paceline.protocol.generation import Provenance
from paceline.runtime.config import CoordinatorConfig, DraftConfig, TargetConfig
from paceline.runtime.gateway_config import GatewayConfig
from tests.docs.stream_picture import THEMES, picture, picture_file, record, services

ROOT = Path(__file__).parents[2]
OPERATIONS, TRAINING = (ROOT / "docs" / f"{page}.md" for page in ("operations", "training"))
ROW = re.compile(r"^\| [^|]+ \| (\d+) \| `([\w.]+)` \| [^|]+ \|$", re.MULTILINE)
DRAFTS = ROOT / "drafts" / "paceline_drafts"
SHIPPED = {
    "default": "smollm2-135m",
    "default-eagle3": "smollm2-135m-eagle3",
    "default-medusa": "smollm2-135m-medusa",
}
DEPTHS = 3
"""Medusa has as many heads."""
SVG = "{http://www.w3.org/2000/svg}"
SERVICES: dict[str, Any] = {
    "coordinator": CoordinatorConfig(),
    "draft": DraftConfig(),
    "gateway": GatewayConfig(),
    "target": TargetConfig(),
}


def table() -> list[tuple[str, str]]:
    section = OPERATIONS.read_text().partition("### What waits where, and its bound")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    found = ROW.findall(section)
    assert len(found) == len(rows) > 20, "each row has a number and a setting"
    return [(name, value) for value, name in found]


@pytest.mark.parametrize(("name", "value"), table())
def test_a_bound_is_what_the_page_says(name: str, value: str) -> None:
    first, _, rest = name.partition(".")
    if name.rpartition(".")[2].isupper():
        module, _, constant = name.rpartition(".")
        found = getattr(import_module(module), constant)
    else:
        found = reduce(getattr, rest.split("."), SERVICES[first])
    assert float(value) == found


def _share(value: float) -> str:
    return f"{value:.3f}".lstrip("0")


def rows() -> list[str]:
    found = []
    for name, folder in SHIPPED.items():
        for table in load_manifest(DRAFTS / folder).acceptance["tables"]:
            figures = [*table["by_depth"][:DEPTHS], table["accepted_length"][DEPTHS - 1]]
            told = [f"{table['temperature']:g}", f"{table['positions']:,}", *map(_share, figures)]
            found.append(f"| `{name}` | {' | '.join(told)} |")
    return found


def test_the_page_shows_what_the_manifests_say() -> None:
    section = TRAINING.read_text().partition("## The default draft\n")[2].partition("\n## ")[0]
    shown = [line for line in section.splitlines() if line.startswith("| `")]
    assert shown == rows()
    assert len(shown) == 9, "three temperatures each"


def test_every_draft_that_is_shipped_is_shown() -> None:
    assert {folder.name for folder in DRAFTS.iterdir() if is_draft(folder)} == {*SHIPPED.values()}


def drawn(svg: str) -> list[tuple[str, str, str]]:
    """Text, provenance and colour of each token in a picture."""
    groups = (group for group in ElementTree.fromstring(svg).iter(f"{SVG}g"))
    found = []
    for group in groups:
        text = group.find(f"{SVG}text")
        assert text is not None
        found.append((text.text or "", group.get("class", "").removeprefix("token "), text.get("fill", "")))
    return found


def test_the_readme_shows_both_pictures() -> None:
    readme = (ROOT / "README.md").read_text()
    block = re.search(r"<picture>.*?</picture>", readme, re.DOTALL)
    assert block is not None
    for name in THEMES:
        assert str(picture_file(name).relative_to(ROOT)) in block.group(0)


@pytest.mark.real_model
@pytest.mark.timeout(600)
@pytest.mark.full
def test_the_committed_pictures_show_what_the_model_writes(tmp_path: Path) -> None:
    with services(tmp_path) as cluster, cluster.client() as client:
        recording = record(client)
    assert {provenance for _, provenance in recording.tokens} == set(Provenance), "the legend has no idle entry"
    for name, theme in THEMES.items():
        committed = picture_file(name).read_text()
        fresh = picture(recording, theme)
        assert drawn(committed) == drawn(fresh), "run `make picture`"
        assert committed == fresh, "run `make picture`"
