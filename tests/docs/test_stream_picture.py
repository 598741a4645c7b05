"""The README's picture shows a real run: the same tokens, each in the colour of its provenance."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cli.display import MEANINGS, STYLES
from paceline.protocol.generation import Provenance
from paceline.protocol.records import GenerationStats
from tests.docs.stream_picture import THEMES, Recording, picture, picture_file, record, services

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"
STATS = GenerationStats(rounds=3, committed=5, num_draft_tokens=4, num_accepted_draft_tokens=2)
RECORDING = Recording(
    (
        ("One", Provenance.TARGET),
        (" light", Provenance.ACCEPTED),
        ("house", Provenance.ACCEPTED),
        (" & <two>", Provenance.RECOVERED),
        ("!\n", Provenance.BONUS),
    ),
    STATS,
)


def drawn(svg: str) -> list[tuple[str, str, str]]:
    """Text, provenance and colour of each token in a picture."""
    groups = (group for group in ElementTree.fromstring(svg).iter(f"{SVG}g"))
    found = []
    for group in groups:
        text = group.find(f"{SVG}text")
        assert text is not None
        found.append((text.text or "", group.get("class", "").removeprefix("token "), text.get("fill", "")))
    return found


@pytest.mark.parametrize("name", THEMES)
def test_each_token_has_the_colour_of_its_provenance(name: str) -> None:
    theme = THEMES[name]
    expected = [
        (text.strip(), provenance.value, theme.colours[STYLES[provenance]]) for text, provenance in RECORDING.tokens
    ]
    assert drawn(picture(RECORDING, theme)) == expected


@pytest.mark.parametrize("name", THEMES)
def test_the_legend_names_every_provenance(name: str) -> None:
    text = "".join(ElementTree.fromstring(picture(RECORDING, THEMES[name])).itertext())
    assert all(meaning in text for meaning in MEANINGS.values())
    assert "3 rounds for 5 tokens; 2 of 4 drafted tokens accepted (50%)" in text


def test_another_provenance_or_text_is_another_picture() -> None:
    theme = THEMES["light"]
    for token in (("One", Provenance.BONUS), ("Two", Provenance.TARGET)):
        other = replace(RECORDING, tokens=(token, *RECORDING.tokens[1:]))
        assert picture(other, theme) != picture(RECORDING, theme)


def test_a_word_of_several_tokens_stays_on_one_row_within_the_picture() -> None:
    tokens = ((" word", Provenance.TARGET), ("s", Provenance.ACCEPTED)) * 40
    root = ElementTree.fromstring(picture(Recording(tokens, STATS), THEMES["light"]))
    width = float(root.get("width", "0"))
    places = [
        (float(text.get("x", "0")), float(text.get("y", "0")), float(text.get("textLength", "0")))
        for group in root.iter(f"{SVG}g")
        for text in group.iter(f"{SVG}text")
    ]
    assert max(x + length for x, _, length in places) < width
    assert len({y for _, y, _ in places}) > 1
    for (x, y, length), (next_x, next_y, _) in zip(places[::2], places[1::2], strict=True):
        assert (next_x, next_y) == (x + length, y)


def test_the_readme_shows_both_pictures() -> None:
    readme = (ROOT / "README.md").read_text()
    block = re.search(r"<picture>.*?</picture>", readme, re.DOTALL)
    assert block is not None
    for name in THEMES:
        assert str(picture_file(name).relative_to(ROOT)) in block.group(0)


@pytest.mark.real_model
@pytest.mark.timeout(600)
def test_the_committed_pictures_show_what_the_model_writes(tmp_path: Path) -> None:
    with services(tmp_path) as cluster, cluster.client() as client:
        recording = record(client)
    assert {provenance for _, provenance in recording.tokens} == set(Provenance), "the legend has no idle entry"
    for name, theme in THEMES.items():
        committed = picture_file(name).read_text()
        fresh = picture(recording, theme)
        assert drawn(committed) == drawn(fresh), "run `make picture`"
        assert committed == fresh, "run `make picture`"
