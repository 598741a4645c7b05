"""The division of a machine's cores between a target and its draft."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.protocol.errors import require

_CORES_LIMIT = "target=N or target=N,draft=M"
_CORES = re.compile(r"target=(?P<target>\d{1,4})(,draft=(?P<draft>\d{1,4}))?")


@dataclass(frozen=True)
class Cores:
    """Compute threads of target and draft; draft 0: there is no draft service."""

    target: int
    draft: int

    @classmethod
    def parse(cls, text: str) -> Cores:
        """Read `target=N` or `target=N,draft=M`.

        Raises:
            InvalidInput: neither.
        """
        match = _CORES.fullmatch(text)
        require(match is not None, "cores", text, _CORES_LIMIT)
        assert match is not None, "required"
        return cls(int(match["target"]), int(match["draft"] or 0))

    def check(self, total: int, *, drafts: bool) -> None:
        """Refuse more cores than the machine has, and a draft's cores without a draft.

        Raises:
            InvalidInput: naming the service.
        """
        require(1 <= self.target <= total, "cores target", self.target, f"in [1, {total}], the cores of this process")
        if drafts:
            require(
                1 <= self.draft <= total, "cores draft", self.draft, f"in [1, {total}], the cores of this process"
            )
        else:
            require(self.draft == 0, "cores draft", self.draft, "left out: there is no draft service")

    def description(self, total: int) -> str:
        """The division in words."""
        if not self.draft:
            return f"target {self.target}"
        return (
            f"target {self.target} + draft {self.draft} {'shared' if self.target + self.draft > total else 'apart'}"
        )


def by_rule(total: int, *, drafts: bool) -> Cores:
    """Give the target all cores and the draft one of them: without a draft at work the target loses none."""
    return Cores(total, 1 if drafts else 0)
