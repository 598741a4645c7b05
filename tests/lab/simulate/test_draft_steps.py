"""What a step of a modelled draft service takes, beside the roofline that it is modelled by."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from paceline.protocol.proposal import ROOT
from paceline_lab.simulate.draft import SimulatedDraft
from paceline_lab.simulate.events import Agenda
from paceline_lab.simulate.scenario import DraftGroup
from paceline_lab.simulate.speculating import OutcomeDrafting
from paceline_lab.simulate.trees import NO_TREE

CONTEXT = 2000
WANTED = 4
MODELLED = DraftGroup(gpu="l4", model="qwen3-0.6b")


@dataclass
class ClientOfDraft:
    """A session whose prompt is computed."""

    key: int
    agenda: Agenda
    prompt_tokens: int = CONTEXT
    tokens: int = 16
    ranks: tuple[int, ...] = (1,) * 16
    chances: tuple[float, ...] = (0.9,) * 16
    came: list[float] = field(default_factory=list)

    def proposal_leaves(self, base: int, tokens: int, draft_ms: float) -> None:
        assert (base, tokens) == (0, WANTED)
        self.came.append(self.agenda.now)

    def shadow_leaves(self, first: int, end: int) -> None:
        pass

    def draft_lost(self) -> None:
        pass


def roofline_ms(sessions: int) -> float:
    return MODELLED.place.step_ms(sessions, sessions, CONTEXT)


@pytest.mark.parametrize("sessions", [1, 16, 32])
def test_a_modelled_drafts_step_reads_every_sessions_context_as_the_roofline_does(sessions: int) -> None:
    """The first to come is drafted for alone in a first step, the others without it in the last one."""
    agenda = Agenda()
    draft = SimulatedDraft(agenda, MODELLED.spec, lambda _: None)
    clients = [ClientOfDraft(number, agenda) for number in range(sessions)]
    for client in clients:
        held = draft.open(client, computes=False)
        held.prompt_left = 0
        draft.commit(held, 0, WANTED, 0.0, False)
    agenda.run()
    alone, together = roofline_ms(1), (WANTED - 2) * roofline_ms(sessions)
    assert clients[0].came == [pytest.approx(alone + together)]
    if sessions > 1:
        assert clients[-1].came == [pytest.approx(alone + together + roofline_ms(sessions - 1))]


def test_what_is_drafted_for_outcomes_reads_the_context_too() -> None:
    agenda = Agenda()
    draft = SimulatedDraft(agenda, MODELLED.spec, lambda _: None)
    client = ClientOfDraft(0, agenda)
    held = draft.open(client, computes=False)
    held.prompt_left = 0
    outcomes = OutcomeDrafting(0, NO_TREE, False, ROOT, 1, 4, 1, 1, client.chances, draft.chance)
    draft.verifying(held, outcomes)
    agenda.run()
    assert outcomes.grown == [pytest.approx(MODELLED.place.step_ms(draft.rows, 1, CONTEXT))]
