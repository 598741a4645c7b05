"""What a request's planner was told, kept for a trace: `paceline bench record` reads it.

Rounds, tokens and n-gram matches are in what the client gets. What only the coordinator hears is where committed
tokens stood in the draft's order, and what the services say that their steps take.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from paceline.costs.cost_line import CostLine

logger = logging.getLogger(__name__)

FILE = "requests.jsonl"
"""In the folder that `record_to` names; one line a request, appended as it ends."""


class ToldShadow(Protocol):
    """What the draft says of committed positions."""

    @property
    def first_position(self) -> int: ...  # noqa: D102
    @property
    def ranks(self) -> Sequence[int]: ...  # noqa: D102
    @property
    def probabilities(self) -> Sequence[float]: ...  # noqa: D102


class RequestRecorder:
    """Keeps one request's shadows by position and writes them, with the latest lines, when the request has ended.

    Args:
        folder: of the file; None: nothing is kept.
        seed: of the request, by which a reader tells requests apart.
        prompt_tokens: positions before the answer.
    """

    def __init__(self, folder: Path | None, seed: int, prompt_tokens: int) -> None:
        self._folder = folder
        self._seed = seed
        self._first = prompt_tokens
        self._shadows: dict[int, tuple[int, float]] = {}
        self._lines: dict[str, CostLine] = {}

    def take_shadow(self, shadow: ToldShadow) -> None:
        """The draft says where committed tokens stood in its order."""
        if self._folder is not None:
            told = zip(shadow.ranks, shadow.probabilities, strict=True)
            self._shadows |= {place - self._first: each for place, each in enumerate(told, shadow.first_position)}

    def take_lines(self, **lines: CostLine) -> None:
        """What services say now: `alone` and `beside` of the target, `draft`."""
        self._lines |= {name: line for name, line in lines.items() if line.is_known}

    def close(self) -> None:
        """The request has ended; may be called again. A record that can't be written costs the record alone."""
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
