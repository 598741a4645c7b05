"""Branching points for programs (JSON), for people (Markdown), and as a page with the texts coloured."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.runtime.files import replace_file
from paceline_lab.plan.document import ReportPart, as_html, as_markdown_text
from paceline_lab.predict.branching import Branching, BranchPoint, CellLosses, ToldToken
from paceline_lab.reporting.presentation import ModelText, cell_text
from paceline_training.focus import BRANCHING

TOLD_PAIRS, TOLD_POINTS = 20, 30
"""Lines of the tables for people; JSON has more."""
EXPLAINED = (
    "Predicted from two teacher-forced passes, not served. Lost: drafted tokens that the target does not draw, "
    "expected under coupled acceptance. TV = 1 - Σ min(p, q), KL(p ‖ q) in nats; p and q are the target's and the "
    "draft's probabilities of what the target drew."
)
Row = Mapping[str, object]


def write_branching(folder: Path, found: Branching, facts: Mapping[str, str]) -> list[Path]:
    """Write `branches.json`, `.md` and `.html`; returns their paths.

    Args:
        folder: made if it isn't there.
        found: of one drafter.
        facts: what the report states: `target`, `drafter`, `tokenizer` (its fingerprint), and how it was made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    title, parts = f"Where {facts['drafter']} parts from {facts['target']}", parts_of(found)
    written = {
        "json": json.dumps(as_json(found, facts), indent=1, ensure_ascii=False) + "\n",
        "md": as_markdown_text(title, facts, parts),
        "html": as_html(title, facts, parts),
    }
    files = {suffix: folder / f"branches.{suffix}" for suffix in written}
    for suffix, file in files.items():
        replace_file(file, lambda temporary, text=written[suffix]: temporary.write_text(text))  # type: ignore[misc]
    return [*files.values()]


def as_json(found: Branching, facts: Mapping[str, str]) -> dict[str, Any]:
    """All of it in plain values; `report` says what it is."""
    return {"report": BRANCHING, **facts, **asdict(found)}


def parts_of(found: Branching) -> list[ReportPart]:
    """The figures, the tables, and the texts, coloured where colours can be."""
    pairs = [
        {
            "target": ModelText(pair.target),
            "draft": ModelText(pair.draft),
            "positions": pair.positions,
            "lost": pair.lost,
            "mostly in": pair.cell,
        }
        for pair in found.pairs[:TOLD_PAIRS]
    ]
    coloured = "".join(f'<p style="white-space:pre-wrap">{"".join(map(_span, text))}</p>' for text in found.texts)
    return [
        ReportPart("All positions", (summary(found), EXPLAINED)),
        ReportPart("By kind of text", tables=(kind_rows(found),)),
        ReportPart("By most probable tokens", tables=(pairs,)),
        ReportPart("Single places", tables=([_point_row(point) for point in found.points[:TOLD_POINTS]],)),
        ReportPart("Texts", (f"{len(found.texts)} of them; in HTML the redder, the more is lost.",), markup=coloured),
    ]


def summary(found: Branching) -> str:
    """One sentence."""
    whole = found.whole
    share = whole.lost / whole.positions
    return f"{whole.positions} positions: {share:.1%} lost, mean TV {whole.tv:.3f}, mean KL {whole.kl:.3f}."


def kind_rows(found: Branching) -> Sequence[Row]:
    """A line for each kind of text, the greatest loss first."""
    return [_cell_row(name, each, found.whole) for name, each in found.cells.items()]


def _cell_row(name: str, cell: CellLosses, whole: CellLosses) -> Row:
    return {
        "kind of text": name,
        "positions": cell.positions,
        "lost": cell.lost,
        "of all lost": f"{cell.lost / whole.lost if whole.lost else 0.0:.1%}",
        "lost of its own": f"{cell.lost / cell.positions:.1%}",
        "TV": cell.tv,
        "KL": cell.kl,
    }


def _point_row(point: BranchPoint) -> Row:
    told = point.token
    return {
        "text": point.number,
        "token": point.place,
        "behind": ModelText(point.before),
        "target": ModelText(told.target),
        "draft": ModelText(told.draft),
        "p": told.p,
        "q": told.q,
        "TV": told.tv,
        "KL": told.kl,
        "kind": told.cell,
    }


def _span(token: ToldToken) -> str:
    target, draft = cell_text(ModelText(token.target)), cell_text(ModelText(token.draft))
    figures = f"p {token.p:.3f}, q {token.q:.3f}; lost {token.lost:.2f}; TV {token.tv:.2f}; {token.cell}"
    tip = html.escape(f"target {target}, draft {draft}; {figures}")
    colour = f"rgba(214,39,40,{0.75 * min(1.0, max(0.0, token.lost)):.2f})"
    return f'<span title="{tip}" style="background:{colour}">{html.escape(token.text)}</span>'
