"""Records of what a request's planner learned, one line a request: `paceline bench record` makes a trace of them.

The client gets rounds, tokens and n-gram matches. The coordinator alone gets the shadows of committed tokens and the
services' cost lines.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from paceline.costs.cost_line import CostLine
from paceline.protocol.draft import Shadow

logger = logging.getLogger(__name__)

FILE = "requests.jsonl"
"""In the folder that `record_to` names; one line a request, appended as it ends."""


class RequestRecorder:
    """Collects one request's shadows by position, and writes them with the latest cost lines when the request ends.

    Args:
        folder: of the file; None: nothing is kept.
        seed: of the request; it identifies the record.
        prompt_tokens: the number of positions before the answer.
    """

    def __init__(self, folder: Path | None, seed: int, prompt_tokens: int) -> None:
        self._folder = folder
        self._seed = seed
        self._first = prompt_tokens
        self._shadows: dict[int, tuple[int, float]] = {}
        self._lines: dict[str, CostLine] = {}

    def take_shadow(self, shadow: Shadow) -> None:
        """Add the shadow of some committed positions."""
        if self._folder is not None:
            standings = zip(shadow.ranks, shadow.probabilities, strict=True)
            self._shadows |= {
                place - self._first: each for place, each in enumerate(standings, shadow.first_position)
            }

    def take_lines(self, **lines: CostLine) -> None:
        """Replace the cost lines by name, as in `paceline_lab.simulate.trace.TracedSetting`."""
        self._lines |= {name: line for name, line in lines.items() if line.is_known}

    def close(self) -> None:
        """Write the record; a second call does nothing. A failure is logged and does not reach the request."""
        folder, self._folder = self._folder, None
        if folder is None:
            return
        line = {
            "seed": self._seed,
            "prompt_tokens": self._first,
            "positions": [*self._shadows],
            "ranks": [rank for rank, _ in self._shadows.values()],
            "chances": [chance for _, chance in self._shadows.values()],
            "lines": {name: line.points for name, line in self._lines.items()},
        }
        try:
            with (folder / FILE).open("a") as file:
                file.write(f"{json.dumps(line)}\n")
        except OSError as error:
            logger.warning("the record of a request was not written: folder=%s error=%s", folder, error)
