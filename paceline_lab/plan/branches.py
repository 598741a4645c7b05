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
from paceline_lab.predict.branching import Branching, BranchPoint, BranchToken, CellLosses
from paceline_lab.reporting.presentation import ModelText, cell_text
from paceline_training.focus import BRANCHING

TABLE_PAIRS, TABLE_POINTS = 20, 30
"""Rows of the tables for people; JSON has more."""
EXPLANATION = (
    "Predicted from two teacher-forced passes, not served. Lost: drafted tokens that the target does not draw, "
    "expected under coupled acceptance. TV = 1 - Σ min(p, q), KL(p ‖ q) in nats; p and q are the target's and the "
    "draft's probabilities of what the target drew."
)
Row = Mapping[str, object]


def write_branching(folder: Path, branching: Branching, facts: Mapping[str, str]) -> list[Path]:
    """Write `branches.json`, `.md` and `.html`; return their paths.

    Args:
        folder: folder of the files; made if it isn't there.
        branching: the branching points of one drafter.
        facts: the report's facts: `target`, `drafter`, `tokenizer` (its fingerprint), and how it was made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    title, parts = f"Where {facts['drafter']} parts from {facts['target']}", parts_of(branching)
    texts = {
        "json": json.dumps(as_json(branching, facts), indent=1, ensure_ascii=False) + "\n",
        "md": as_markdown_text(title, facts, parts),
        "html": as_html(title, facts, parts),
    }
    files = {suffix: folder / f"branches.{suffix}" for suffix in texts}
    for suffix, file in files.items():
        replace_file(file, lambda temporary, text=texts[suffix]: temporary.write_text(text))  # type: ignore[misc]
    return [*files.values()]


def as_json(branching: Branching, facts: Mapping[str, str]) -> dict[str, Any]:
    """Return everything in plain values; `report` names the kind of report."""
    return {"report": BRANCHING, **facts, **asdict(branching)}


def parts_of(branching: Branching) -> list[ReportPart]:
    """Return the figures, the tables, and the texts, which are coloured in HTML."""
    pairs = [
        {
            "target": ModelText(pair.target),
            "draft": ModelText(pair.draft),
            "positions": pair.positions,
            "lost": pair.lost,
            "mostly in": pair.cell,
        }
        for pair in branching.pairs[:TABLE_PAIRS]
    ]
    markup = "".join(f'<p style="white-space:pre-wrap">{"".join(map(_span, text))}</p>' for text in branching.texts)
    return [
        ReportPart("All positions", (summary(branching), EXPLANATION)),
        ReportPart("By kind of text", tables=(kind_rows(branching),)),
        ReportPart("By most probable tokens", tables=(pairs,)),
        ReportPart("Single places", tables=([_point_row(point) for point in branching.points[:TABLE_POINTS]],)),
        ReportPart(
            "Texts", (f"{len(branching.texts)} of them; in HTML the redder, the more is lost.",), markup=markup
        ),
    ]


def summary(branching: Branching) -> str:
    """Write the losses at all positions in a sentence."""
    whole = branching.whole
    share = whole.lost / whole.positions
    return f"{whole.positions} positions: {share:.1%} lost, mean TV {whole.tv:.3f}, mean KL {whole.kl:.3f}."


def kind_rows(branching: Branching) -> Sequence[Row]:
    """Return a row for each kind of text, the greatest loss first."""
    return [_cell_row(name, each, branching.whole) for name, each in branching.cells.items()]


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
    token = point.token
    return {
        "text": point.number,
        "token": point.place,
        "behind": ModelText(point.before),
        "target": ModelText(token.target),
        "draft": ModelText(token.draft),
        "p": token.p,
        "q": token.q,
        "TV": token.tv,
        "KL": token.kl,
        "kind": token.cell,
    }


def _span(token: BranchToken) -> str:
    target, draft = cell_text(ModelText(token.target)), cell_text(ModelText(token.draft))
    figures = f"p {token.p:.3f}, q {token.q:.3f}; lost {token.lost:.2f}; TV {token.tv:.2f}; {token.cell}"
    tip = html.escape(f"target {target}, draft {draft}; {figures}")
    colour = f"rgba(214,39,40,{0.75 * min(1.0, max(0.0, token.lost)):.2f})"
    return f'<span title="{tip}" style="background:{colour}">{html.escape(token.text)}</span>'
