"""A report's parts, as Markdown and as one HTML page without anything outside it."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline_lab.reporting.presentation import cell_text, markdown_table

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-spacing: 0; font-size: .85rem; display: block; overflow-x: auto; }
th, td { border-bottom: 1px solid #8886; padding: .25rem .6rem; text-align: right; }
td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: Canvas; }
td:first-child span {
  display: block; width: max-content; max-width: min(22rem, 42vw); white-space: normal; overflow-wrap: anywhere;
}
.verdict { border-left: .3rem solid #2a7; padding: .2rem 1rem; font-size: 1.1rem; }
.dont { border-color: #c52; }
.plot { overflow-x: auto; }
svg { min-width: 34rem; max-width: 100%; height: auto; background: #fff; border-radius: .4rem; }
h1, p, li { overflow-wrap: anywhere; }
"""


@dataclass(frozen=True)
class ReportPart:
    """A heading with sentences, tables and plots below it.

    Attributes:
        sentences: a paragraph each.
        tables: rows by column; of one shape each.
        plots: SVG documents, by file name without its ending.
        markup: HTML that the page alone shows behind the rest.
        verdict: whether the sentences are the recommendation; None: they aren't one.
    """

    title: str
    sentences: Sequence[str] = ()
    tables: Sequence[Sequence[Mapping[str, object]]] = ()
    plots: Mapping[str, str] = field(default_factory=dict)
    markup: str = ""
    verdict: bool | None = None


def as_markdown_text(title: str, facts: Mapping[str, str], parts: Sequence[ReportPart]) -> str:
    """Write the report as Markdown; plots are files beside it."""
    lines = [f"# {title}\n", "".join(f"- {name}: {value}\n" for name, value in facts.items())]
    for part in parts:
        lines.append(f"## {part.title}\n")
        lines += [f"{sentence}\n" for sentence in part.sentences]
        lines += [markdown_table(rows) for rows in part.tables if rows]
        lines += [f"![{name}]({name}.svg)\n" for name in part.plots]
    return "\n".join(lines)


def as_html(title: str, facts: Mapping[str, str], parts: Sequence[ReportPart]) -> str:
    """Write the report as one page."""
    bullets = "".join(f"<li>{html.escape(name)}: {html.escape(value)}</li>" for name, value in facts.items())
    body = "".join(_part_html(part) for part in parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>'
        f"<body><h1>{html.escape(title)}</h1>{body}<h2>How it was made</h2><ul>{bullets}</ul></body></html>\n"
    )


def _part_html(part: ReportPart) -> str:
    kind = "" if part.verdict is None else f' class="verdict{"" if part.verdict else " dont"}"'
    sentences = "".join(f"<p{kind}>{_sentence_html(sentence)}</p>" for sentence in part.sentences)
    tables = "".join(_table_html(rows) for rows in part.tables if rows)
    plots = "".join(f'<div class="plot">{svg[svg.index("<svg") :]}</div>' for svg in part.plots.values())
    return f"<section><h2>{html.escape(part.title)}</h2>{sentences}{tables}{plots}{part.markup}</section>"


def _sentence_html(sentence: str) -> str:
    """Escaped; what stands in backticks is code, as in Markdown."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(sentence))


def _table_html(rows: Sequence[Mapping[str, object]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0])
    cells = ([html.escape(cell_text(value)) for value in row.values()] for row in rows)
    lines = ("".join(f"<td><span>{cell}</span></td>" for cell in row) for row in cells)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
