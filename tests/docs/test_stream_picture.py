"""The README's picture shows a real run: the same tokens, each in the colour of its provenance."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from paceline.protocol.generation import Provenance
from tests.docs.stream_picture import THEMES, picture, picture_file, record, services

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


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
