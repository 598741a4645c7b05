"""Commands as integers and back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from paceline.engine.interface import Draw, StepItem, StepPlan
from paceline.engine.parallel import wire
from paceline.engine.parallel.group import INLINE_INTS
from paceline.engine.parallel.wire import Beat, CloseCommand, Command, Open, StepCommand, Stop, decode, encode
from paceline.protocol.proposal import ROOT, Acceptance, Proposal, SparseDistribution
from paceline.protocol.sampling import NoiseKey
from paceline.protocol.target import Round

SUPPORTS = (SparseDistribution((5, 9), (0.25, 0.75)), SparseDistribution((1, 2), (0.7, 0.3)))
PROPOSAL = Proposal(7, (5, 1), (0.25, 0.7), supports=SUPPORTS)
TREE = Proposal(7, (5, 1, 2), (1.0, 1.0, 1.0), (ROOT, ROOT, 1), drafter="n-gram é")
STEP = StepCommand(
    StepPlan(
        (
            StepItem(1 << 40, 3, (4, 5, 1), logit_rows=(0, 1, 2)),
            StepItem(2, 9, (7,), (ROOT, 0, 1), kept_rows=(6, 8), trunk_length=7),
        )
    ),
    (
        Draw(Acceptance.BLOCK, 0.1, NoiseKey((1 << 64) - 1, 5), Round(1, 3, ROOT, (4,), PROPOSAL), 49152),
        Draw(Acceptance.COUPLED, 0.0, NoiseKey(1 << 62), Round(1, 3, 2, (4, 6), TREE, "00-trace"), 97),
        None,
    ),
)


@pytest.mark.parametrize("command", [Open(3, 900), CloseCommand(1 << 33), STEP, Beat(), Stop()])
def test_every_command_comes_back_as_it_was(command: Command) -> None:
    ints = encode(command)
    assert ints.dtype == np.int64
    assert decode(ints) == command
    assert ints.size < 200 < INLINE_INTS, "a lone session's round fits into the first broadcast"


def test_a_field_that_has_no_layout_is_named_at_once() -> None:
    @dataclass
    class Wrong:
        table: dict[str, int]

    with pytest.raises(TypeError, match=r"dict\[str, int\]: has no layout"):
        wire._layout(Wrong)
