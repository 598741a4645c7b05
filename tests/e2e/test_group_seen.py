"""Requests that share a target and rest: explanations, descriptions and records say so."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from coordinator.policy.planner import Planner
from coordinator.policy.round_times import TargetTimes
from draft_service.drafters.model import ModelDrafter
from paceline.costs.goodput import Mode
from paceline.costs.service_costs import TargetPeerCosts
from paceline.engine.table.engine import load_table
from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from tests.e2e.in_process import NEAR, TARGET, three_services

TIMED = f"{TARGET},step_ms=5"
"""So slow that requests which begin together share it."""
REQUESTS = 4
PAUSE = 1e6
PLANNED = SpeculationSettings(explain=True)
FIXED = SpeculationSettings(drafter="model", num_draft_tokens=2)
request = partial(GenerateRequest, token_ids=(1, 2, 3), max_new_tokens=40, ignore_eos=True)


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups in which every mode but rest has lost, and is paused."""
    fresh = Planner.target

    def target(planner: Planner, peer: TargetPeerCosts) -> TargetTimes:
        times = fresh(planner, peer)
        for mode in (Mode.MATCHES, Mode.DRAFTS):
            times.group.account(REQUESTS, mode).opens_at = PAUSE
        return times

    monkeypatch.setattr(Planner, "target", target)


async def test_a_group_that_rests_is_seen(lost: None) -> None:
    drafter = ModelDrafter(load_table(NEAR), 128, "model")
    async with three_services(load_table(TIMED), drafter) as client:
        (before,) = await client.describe_models()
        requests = [request(seed=seed, speculation=PLANNED) for seed in range(REQUESTS)]
        generations = await asyncio.gather(*map(client.generate, requests))
        fixed = await client.generate(request(speculation=FIXED))
        (model,) = await client.describe_models()
    assert [peer.group for peer in before.peers] == [None, None], "nobody has been there"
    for generation in generations:
        assert "rest" in {record.mode for record in generation.stats.records}
        explanation = generation.stats.explanation
        assert explanation is not None and explanation.group is not None
        assert explanation.group.mode == "rest"
        assert [mode.state for mode in explanation.group.modes] == ["runs", "paused", "paused"]
    assert {record.mode for record in fixed.stats.records} == {""}, "it says itself how to draft"
    target, draft = model.peers
    assert (target.up, target.problem, draft.up, draft.problem) == (True, "", True, "")
    assert target.fingerprint.model.startswith("table:vocab=64,seed=1") and target.step_ms > 2
    assert target.group is not None and draft.group is None
    assert target.group.mode == "rest"
