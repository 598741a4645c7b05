"""Whether processes that no fault ends grow while faults fall."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from paceline_lab.reporting.presentation import markdown_table
from tests.chaos.resources import KINDS, ResourceWatch, Samples

MEMORY = KINDS[0]
WARM_SHARE = 1 / 2
"""Of the time: from when on processes are followed. Allocators grow for some minutes, by 1 to 2 % in two (measured),
until they have what they need."""
LEAST_JUDGED_MINUTES = 10
"""Growth over fewer is shown and not judged."""
FLAT_SHARE_AN_HOUR = 0.02
"""Growth in an hour, over what a process holds, that counts as none: a month of it is what restarts are for."""


class Growth:
    """Follows processes that are idle, from `warm_s` on; one that is replaced is named, and begins anew."""

    def __init__(self, warm_s: float) -> None:
        self.replaced: list[str] = []
        self.watch = ResourceWatch()
        self._warm_s = warm_s
        self._pids: Mapping[str, int] = {}

    def look(self, pids: Mapping[str, int]) -> None:
        for label, pid in self._pids.items():
            if pids[label] != pid:
                self.replaced.append(label)
                self.watch.samples.pop(label, None)
        self._pids = dict(pids)
        if self.watch.now_s >= self._warm_s:
            self.watch.sample(pids)

    def failures(self) -> list[str]:
        ended = [f"{label} ended unasked" for label in self.replaced]
        lives = self.watch.samples
        return ended + [
            f"memory of {each} grows: {lives[each].drift(MEMORY)} MiB a minute" for each in self._growing()
        ]

    def text(self) -> str:
        failures = "; ".join(self.failures()) or "none"
        lives = [_life(label, life) for label, life in self.watch.samples.items()]
        return f"## Processes, idle between faults\n\n{markdown_table(lives)}\nWhat must not be: {failures}.\n"

    def _growing(self) -> Iterator[str]:
        """Processes whose memory grows for certain, and by more than what counts as none."""
        for label, life in self.watch.samples.items():
            allowed = FLAT_SHARE_AN_HOUR * life.most(MEMORY) / 60
            if life.minutes >= LEAST_JUDGED_MINUTES and life.drift(MEMORY).low > allowed:
                yield label


def _life(label: str, life: Samples) -> dict[str, object]:
    shown: dict[str, object] = {"process": label, "samples": len(life.at_s)}
    for kind in KINDS:
        shown[f"{kind}, at most"] = f"{life.most(kind):.0f}"
        shown[f"{kind} a minute (95 %)"] = str(life.drift(kind))
    return shown
