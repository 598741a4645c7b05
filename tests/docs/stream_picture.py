"""Draws the README's picture of a coloured stream from a real generation: `make picture`.

The generation is greedy, with an n-gram drafter and a fixed number of draft tokens, and every round is sent by
the coordinator. So its tokens and their provenance are the same in each run. Times would not be, so the picture
has none.
"""

from __future__ import annotations

import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from paceline.cli.display import MEANINGS, STYLES
from paceline.client import Client
from paceline.protocol.generation import (
    ChatMessage,
    Finished,
    GenerateRequest,
    Provenance,
    SpeculationSettings,
    Tokens,
)
from paceline.protocol.records import GenerationStats
from paceline.protocol.sampling import SamplingParams
from tests.e2e.cluster import Cluster

MODEL = "smollm2-135m"
NUM_DRAFT_TOKENS = 4
PROMPT = (
    "Repeat this passage word for word: The keeper climbed the stairs of the lighthouse, lit the lamp, and wrote "
    "the hour in the book. The keeper climbed down the stairs of the lighthouse, closed the book, and went to sleep."
)
"""The prompt of `make demo`."""
FOLDER = Path(__file__).parents[2] / "docs" / "images"

COLUMNS = 86
CHARACTER = 9.0
"""Width of one character in pixels; texts are stretched to it, whatever font the reader has."""
FONT_SIZE = 15
LINE = 27
MARGIN = 28


@dataclass(frozen=True)
class Recording:
    """What a picture shows: each token's text with its provenance, and the statistics."""

    tokens: tuple[tuple[str, Provenance], ...]
    stats: GenerationStats


@dataclass(frozen=True)
class Theme:
    """Colours of one picture; `colours` is keyed by the terminal colours of `display.STYLES`."""

    background: str
    border: str
    quiet: str
    colours: Mapping[str, str]


THEMES: Mapping[str, Theme] = {
    "light": Theme(
        "#ffffff",
        "#d0d7de",
        "#59636e",
        {"green": "#116329", "yellow": "#8a4600", "cyan": "#0550ae", "default": "#1f2328"},
    ),
    "dark": Theme(
        "#0d1117",
        "#30363d",
        "#9198a1",
        {"green": "#56d364", "yellow": "#e3b341", "cyan": "#56d4dd", "default": "#e6edf3"},
    ),
}


def record(client: Client) -> Recording:
    """Generate the picture's text on services that send every round (`lease` and `max_prefetched` 0)."""
    request = GenerateRequest(
        messages=(ChatMessage("user", PROMPT),),
        sampling=SamplingParams(temperature=0),
        seed=0,
        max_new_tokens=96,
        speculation=SpeculationSettings(drafter="ngram", num_draft_tokens=NUM_DRAFT_TOKENS),
    )
    tokens: list[tuple[str, Provenance]] = []
    for event in client.stream(request):
        if isinstance(event, Tokens):
            begins = (0, *event.text_ends)
            texts = (event.text[begin:end] for begin, end in zip(begins, event.text_ends, strict=False))
            tokens += zip(texts, event.provenance, strict=True)
        elif isinstance(event, Finished):
            stats = event.stats
    return Recording(tuple(tokens), stats)


class _Sheet:
    """Rows of monospaced text that grow downwards, as SVG elements."""

    def __init__(self, theme: Theme) -> None:
        self._theme = theme
        self._elements: list[str] = []
        self._row = 0
        self._column = 0

    def write(self, text: str, colour: str) -> None:
        """Add text behind what the row has."""
        self._elements.append(_text(self._row, self._column, text, colour))
        self._column += len(text)

    def new_row(self, rows: int = 1) -> None:
        """Go on at the beginning of a row below."""
        self._row, self._column = self._row + rows, 0

    def token(self, text: str, provenance: Provenance, word: str) -> None:
        """Add a token on ground of its colour; a `word` of several tokens stays on one row."""
        visible = text.strip()
        self._column += len(text) - len(text.lstrip()) if self._column else 0
        if self._column + len(word) > COLUMNS:
            self.new_row()
        if visible:
            colour = self._theme.colours[STYLES[provenance]]
            x, y = _place(self._row, self._column)
            self._elements.append(
                f'<g class="token {provenance.value}"><rect x="{x + 0.75:g}" y="{y - 18:g}" '
                f'width="{len(visible) * CHARACTER - 1.5:g}" height="24" rx="4" fill="{colour}" '
                f'fill-opacity="{0 if provenance is Provenance.TARGET else 0.17}"/>'
                f"{_text(self._row, self._column, visible, colour)}</g>"
            )
        self._column += len(visible)
        if "\n" in text:
            self.new_row(text.count("\n"))

    def svg(self) -> str:
        """The whole picture."""
        width, height = 2 * MARGIN + COLUMNS * CHARACTER, 2 * MARGIN + self._row * LINE
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
            f'viewBox="0 0 {width:g} {height:g}" font-size="{FONT_SIZE}" '
            'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace">',
            "<title>A stream of tokens, coloured by where each came from</title>",
            f'<rect x="0.5" y="0.5" width="{width - 1:g}" height="{height - 1:g}" rx="10" '
            f'fill="{self._theme.background}" stroke="{self._theme.border}"/>',
        )
        return "\n".join([*head, *self._elements, "</svg>", ""])


def picture(recording: Recording, theme: Theme) -> str:
    """The SVG of a recording: prompt, text, legend, statistics."""
    sheet = _Sheet(theme)
    for line in textwrap.wrap(f"prompt: {PROMPT}", COLUMNS):
        sheet.write(line, theme.quiet)
        sheet.new_row()
    sheet.new_row()
    for index, (text, provenance) in enumerate(recording.tokens):
        sheet.token(text, provenance, _word_at(recording.tokens, index))
    sheet.new_row(2)
    sheet.write(_statistics(recording.stats), theme.colours["default"])
    sheet.new_row()
    sheet.write(f"{MODEL}, greedy, n-gram drafter, {NUM_DRAFT_TOKENS} tokens per proposal", theme.quiet)
    sheet.new_row(2)
    for provenance, meaning in MEANINGS.items():
        sheet.write("\u25a0 ", theme.colours[STYLES[provenance]])
        sheet.write(meaning, theme.quiet)
        sheet.new_row()
    return sheet.svg()


def _word_at(tokens: Sequence[tuple[str, Provenance]], index: int) -> str:
    """The token at `index` with what follows it up to the next space."""
    word = tokens[index][0].strip()
    for text, _ in tokens[index + 1 :]:
        if text[:1].isspace():
            break
        word += text.rstrip()
    return word


def _statistics(stats: GenerationStats) -> str:
    return (
        f"{stats.rounds} rounds for {stats.committed} tokens; {stats.num_accepted_draft_tokens} of "
        f"{stats.num_draft_tokens} drafted tokens accepted ({stats.draft_acceptance_rate:.0%})"
    )


def _place(row: int, column: int) -> tuple[float, float]:
    """Where a text begins: its left end and its baseline."""
    return MARGIN + column * CHARACTER, MARGIN + row * LINE + 18


def _text(row: int, column: int, text: str, colour: str) -> str:
    x, y = _place(row, column)
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{colour}" textLength="{len(text) * CHARACTER:g}" '
        f'lengthAdjust="spacingAndGlyphs" xml:space="preserve">{escape(text)}</text>'
    )


def picture_file(name: str, folder: Path = FOLDER) -> Path:
    """Where the picture of a theme lies."""
    return folder / f"stream-{name}.svg"


@contextmanager
def services(folder: Path) -> Iterator[Cluster]:
    """Services on which nothing depends on time: the coordinator sends every round."""
    with Cluster(
        folder,
        target_model=MODEL,
        drafters=(),
        target_flags={"engine.threads": 1},
        coordinator_flags={"lease": 0, "max_prefetched": 0},
    ) as cluster:
        yield cluster


def main() -> None:
    """Record a generation and write a picture for each theme."""
    with (
        tempfile.TemporaryDirectory(prefix="paceline-") as folder,
        services(Path(folder)) as cluster,
        cluster.client() as client,
    ):
        recording = record(client)
    for name, theme in THEMES.items():
        picture_file(name).write_text(picture(recording, theme))


if __name__ == "__main__":
    main()
