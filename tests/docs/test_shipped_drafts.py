"""The table of the shipped drafts' acceptance in the training page is that of their manifests."""

from __future__ import annotations

from pathlib import Path

from paceline.drafters.layers.manifest import load_manifest
from paceline.models.resolve import is_draft

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "training.md"
DRAFTS = ROOT / "drafts" / "paceline_drafts"
SHIPPED = {
    "default": "smollm2-135m",
    "default-eagle3": "smollm2-135m-eagle3",
    "default-medusa": "smollm2-135m-medusa",
}
DEPTHS = 3
"""Medusa has as many heads."""


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
    section = PAGE.read_text().partition("## The default draft\n")[2].partition("\n## ")[0]
    shown = [line for line in section.splitlines() if line.startswith("| `")]
    assert shown == rows()
    assert len(shown) == 9, "three temperatures each"


def test_every_draft_that_is_shipped_is_shown() -> None:
    assert {folder.name for folder in DRAFTS.iterdir() if is_draft(folder)} == {*SHIPPED.values()}
