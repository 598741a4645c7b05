"""How a simulated coordinator drafts: what its requests ask for, and its own fan-out."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.costs.acceptance import FAN_OUT
from paceline.protocol.errors import require
from paceline.protocol.generation import SpeculationSettings
from paceline.protocol.proposal import AUTO

MAX_CONSTANT = 16
"""Longest proposal of a constant policy."""


@dataclass(frozen=True)
class Policy:
    """What each request asks for.

    Attributes:
        tokens: of a proposal; 0: drafting is off; None: the coordinator's planner decides.
        fan_out: outcomes for each node that are drafted for meanwhile; 0: rounds wait for their drafts.
    """

    tokens: int | None = None
    fan_out: int = FAN_OUT

    def __post_init__(self) -> None:
        require(self.tokens is None or 0 <= self.tokens <= MAX_CONSTANT, "k", self.tokens, f"in [0, {MAX_CONSTANT}]")

    @property
    def name(self) -> str:
        """As `paceline simulate --k` names it."""
        if not self.tokens:
            return AUTO if self.tokens is None else "0"
        return f"{self.tokens}+ahead" if self.fan_out else str(self.tokens)

    @property
    def speculation(self) -> SpeculationSettings:
        """What a request says."""
        return speculation_of(self.tokens)

    @classmethod
    def parse(cls, text: str, fan_out: int = FAN_OUT) -> Policy:
        """Read `auto`, `4`, which waits for its drafts, or `4+ahead`, which drafts outcomes meanwhile.

        Raises:
            InvalidInput: it is none of these.
        """
        if text == AUTO:
            return cls(None, fan_out)
        number, plus, ahead = text.partition("+")
        is_constant = number.isdecimal() and (not plus or ahead == "ahead")
        require(is_constant, "k", text, "numbers, auto, or a number and +ahead")
        return cls(int(number), fan_out if plus else 0)


def speculation_of(tokens: int | None) -> SpeculationSettings:
    """What a request says for proposals of so many tokens; 0: drafting is off; None: the coordinator plans."""
    return SpeculationSettings(off=tokens == 0, num_draft_tokens=tokens or None)


PLANNED = Policy()
TARGET_ONLY = Policy(0, 0)
